"""Gradients in one flat buffer: one reduction, of one fixed layout, so that sums are repeatable."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dflash_core.training.ranks.groups import Ranks

__all__ = ["FlatGradients"]


class FlatGradients:
    """Makes every parameter's ``.grad`` a view into one float32 buffer.

    Of spread parameters the buffer holds this rank's share.

    Attributes:
        buffer: All gradients, in the parameters' order.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        shares = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
        self.buffer: Tensor = torch.zeros(sum(s.numel() for s in shares), device=shares[0].device)
        self._group: dist.ProcessGroup | None = None
        start = 0
        for parameter, share in zip(parameters, shares, strict=True):
            end = start + share.numel()
            view = self.buffer[start:end].view_as(share)
            if isinstance(parameter, DTensor):
                self._group = parameter.device_mesh.get_group()
                view = DTensor.from_local(
                    view,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            parameter.grad = view
            start = end

    def zero(self) -> None:
        """Forget the gradients."""
        self.buffer.zero_()

    def add_up(self, ranks: Ranks, *, what: str) -> None:
        """Sum over the consuming ranks; spread gradients were summed as they came.

        Args:
            ranks: This process among the others.
            what: What is waited for, for the error message.
        """
        if self._group is None:
            ranks.add(self.buffer, what=what)

    def normalise(self, weight_sum: float, max_norm: float) -> float:
        """Divide by the step's weight, clip, and return the norm before clipping."""
        self.buffer.div_(weight_sum)
        length = torch.linalg.vector_norm(self.buffer)
        if self._group is not None:
            dist.all_reduce(length.square_(), group=self._group)
            length.sqrt_()
        norm = float(length)
        if norm > max_norm:
            self.buffer.mul_(max_norm / norm)
        return norm
