"""Settings and ready-made runs."""
