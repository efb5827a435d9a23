"""Prefect flows: which steps, in what order, how often."""
