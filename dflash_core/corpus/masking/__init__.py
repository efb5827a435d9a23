"""Chat templates, and which tokens of a chat carry loss."""
