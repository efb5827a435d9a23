"""What will it cost? Cost model, simulation of the pipeline, and the gate."""
