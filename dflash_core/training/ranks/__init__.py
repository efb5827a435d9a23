"""Processes of one run: groups, one order of messages, sharding, stopping."""
