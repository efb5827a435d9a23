"""Answers in the target's own words: kept, joined, asked of an endpoint."""
