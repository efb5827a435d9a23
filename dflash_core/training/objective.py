"""What a training run trains, as the trainer sees it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_core.corpus.store import Sample, TokenStore

__all__ = ["MicroBatch", "Objective", "autocast"]


@dataclass(frozen=True)
class MicroBatch:
    """Which samples run together.

    Attributes:
        rows: Sample indices of each row: one, or several when packed.
        padded_length: Token slots of a row.
        max_length: Longer samples are cut to this many tokens.
        weight: Factor on its loss; 0 for a repeat that only fills a step.
        epoch: Epoch, from which anchors are drawn.
    """

    rows: Sequence[Sequence[int]]
    padded_length: int
    max_length: int
    weight: float
    epoch: int

    def samples(self, store: TokenStore) -> list[list[Sample]]:
        """Read the samples of each row, cut to the plan's longest length."""
        return [[_cut(store[index], self.max_length) for index in row] for row in self.rows]


def _cut(sample: Sample, most: int) -> Sample:
    if len(sample.input_ids) <= most:
        return sample
    return replace(sample, input_ids=sample.input_ids[:most], loss_mask=sample.loss_mask[:most])


class Objective(Protocol):
    """Turns micro-batches into gradients and sums."""

    num_sums: int
    """Length of the vector that `run` returns."""

    @property
    def module(self) -> nn.Module:
        """What is trained."""
        ...

    def run(self, micro_batch: MicroBatch) -> Tensor:
        """Add the gradient of the loss *sum* and return float64 sums, shape ``(num_sums,)``.

        The first is the loss sum, the second the weight sum; all add over ranks and micro-batches.
        """
        ...

    def describe(self, sums: Tensor) -> dict[str, Any]:
        """Return the metrics that a step's sums say."""
        ...

    def save(self, run_dir: Path, facts: dict[str, Any]) -> Path:
        """Write the trained model under its final name in the run folder."""
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

    def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return plain(query.float(), key.float(), value.float(), *args, **kwargs)

    attend.in_float32 = True  # type: ignore[attr-defined]
    F.scaled_dot_product_attention = attend
