"""Who runs together, when, and where? Strategies turn lengths into an epoch plan."""
