"""torchrun: started, watched, on one machine or several."""
