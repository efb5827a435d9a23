"""Answers in the target's own words, from this process or an endpoint."""
