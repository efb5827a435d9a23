"""Memory used, guarded, and tried before the first step."""
