"""The DFlash drafter: anchors, mask, model and loss."""
