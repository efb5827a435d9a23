"""What a batch is learnt with: a drafter or the target itself."""
