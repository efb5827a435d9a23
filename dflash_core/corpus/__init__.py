"""What do the samples say? Chats become token ids and a loss mask in a memory-mapped store."""
