"""Prefect tasks: each reads its inputs, calls one core function and records the result."""
