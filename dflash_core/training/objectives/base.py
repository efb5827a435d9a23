"""What a training run trains, as the trainer sees it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_core.training.batches.types import MicroBatch

__all__ = ["Objective", "Outcome", "autocast"]


@dataclass(frozen=True)
class Outcome:
    """What a micro-batch gave.

    Attributes:
        sums: Float64 sums that add over micro-batches and ranks, shape ``(num_sums,)``; the first
            is the loss sum, the second the weight sum.
        loss_GK: Loss sums by length group and position, float64.
        weight_GK: Their weights.
        by_sample: Loss and weight sum of each sample, float64, shape ``(num_samples, 2)``.
    """

    sums: Tensor
    loss_GK: Tensor
    weight_GK: Tensor
    by_sample: Tensor


class Objective(Protocol):
    """Turns micro-batches into gradients and sums."""

    num_sums: int
    """Length of the sums."""
    num_positions: int
    """Positions that the loss is kept apart by."""
    guess_loss: float
    """Loss of a model that takes all tokens of its vocabulary to be equally likely."""

    @property
    def module(self) -> nn.Module:
        """What is trained."""
        ...

    def prepare(self, micro_batch: MicroBatch) -> Any:
        """Read and lay out a micro-batch on the host; called ahead, in another thread."""
        ...

    def run(
        self, micro_batch: MicroBatch, batch: Any, features_MF: Tensor | None, groups: Tensor
    ) -> Outcome:
        """Sum the loss, and add the gradient of that sum where gradients are enabled.

        Args:
            micro_batch: Which samples.
            batch: What `prepare` made of it.
            features_MF: Captured features of its context tokens, when the objective needs them.
            groups: Length group of each sample, shape ``(num_samples,)``.
        """
        ...

    def idle(self) -> None:
        """Run next to nothing with weight 0 where what is trained is spread, so that the other
        ranks of a round can; nothing where it is whole."""
        ...

    def describe(self, sums: Tensor) -> dict[str, Any]:
        """Return the metrics that a step's sums say."""
        ...

    def score(self, sums: Tensor) -> float:
        """Return how good the model is on held-out samples; more is better."""
        ...

    def save(self, run_dir: Path, weights: dict[str, Tensor], facts: dict[str, Any]) -> Path:
        """Write the trained model under its final name in the run folder.

        Args:
            run_dir: The run's folder.
            weights: The module's state, whole.
            facts: JSON-able facts for the manifest.
        """
        ...


def autocast(device: torch.device, precision: str) -> Any:
    """Return the context that matrix products run in."""
    enabled = precision == "bfloat16"
    if enabled and device.type == "cpu":
        _attend_in_float32()
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled)


def _attend_in_float32() -> None:
    """Keep attention in float32 under CPU autocast: its bfloat16 backward is many times slower."""
    plain = F.scaled_dot_product_attention
    if getattr(plain, "in_float32", False):
        return

    def attend(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        if not torch.is_autocast_enabled("cpu"):  # a frozen target in bfloat16 stays in it
            return plain(query, key, value, attn_mask, **options)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.float()
        with torch.autocast("cpu", enabled=False):
            return plain(query.float(), key.float(), value.float(), attn_mask, **options)

    attend.in_float32 = True  # type: ignore[attr-defined]
    F.scaled_dot_product_attention = attend
