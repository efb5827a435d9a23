"""Runs recorded with MLflow."""
