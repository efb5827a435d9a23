"""What a micro-batch costs on this machine, measured by real steps."""
