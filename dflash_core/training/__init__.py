"""The torchrun program: roles, features, optimizer steps, checkpoints, monitor."""
