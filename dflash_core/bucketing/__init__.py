"""Which lengths share a shape? Bucket edges fitted optimally on the length histogram."""
