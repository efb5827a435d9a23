"""Is it any good? Plain and speculative decoding, acceptance length."""
