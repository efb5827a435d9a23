"""Chats to a token store, in parallel, restartable."""
