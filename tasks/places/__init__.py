"""Where things lie: run folders, cached artifacts, object storage."""
