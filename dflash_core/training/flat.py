"""Gradients in one flat buffer: one reduction, of one fixed layout, so that sums are repeatable."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["FlatGradients"]


class FlatGradients:
    """Makes every parameter's ``.grad`` a view into one float32 buffer.

    Attributes:
        buffer: All gradients, in the parameters' order.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        device = parameters[0].device
        self.buffer: Tensor = torch.zeros(sum(p.numel() for p in parameters), device=device)
        start = 0
        for parameter in parameters:
            end = start + parameter.numel()
            parameter.grad = self.buffer[start:end].view_as(parameter)
            start = end

    def zero(self) -> None:
        """Forget the gradients."""
        self.buffer.zero_()

    def normalise(self, weight_sum: float, max_norm: float) -> float:
        """Divide by the step's weight, clip, and return the norm before clipping."""
        self.buffer.div_(weight_sum)
        norm = float(torch.linalg.vector_norm(self.buffer))
        if norm > max_norm:
            self.buffer.mul_(max_norm / norm)
        return norm
