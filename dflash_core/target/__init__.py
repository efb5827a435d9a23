"""The frozen large model: loading it and capturing its hidden features."""
