"""From a plan to collated batches, in the order of steps."""
