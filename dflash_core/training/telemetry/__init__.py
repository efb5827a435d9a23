"""What a run tells of itself: metrics, status, held-out loss, composition, forgetting."""
