"""Hidden states of the target: computed, kept on disk, sent to drafter ranks."""
