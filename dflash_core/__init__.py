"""Length-aware planning, training and evaluation of DFlash drafters, free of any orchestrator."""
