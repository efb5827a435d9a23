"""Who can serve it? Checkpoint layouts and the check that they load."""
