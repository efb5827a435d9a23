"""Which micro-batches a calibration times: real samples, on a grid that keeps the terms apart."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_core.errors import CalibrationError
from dflash_core.planning import BatchingConfig, num_anchors
from dflash_core.training.batches.types import MicroBatch

__all__ = ["Shape", "calibration_shapes"]

LENGTH_QUANTILES = (0.05, 0.35, 0.65, 0.9, 1.0)
NEIGHBOURS = 4
NUM_MIXED = 3


@dataclass(frozen=True)
class Shape:
    """One micro-batch to time.

    Attributes:
        cell: Grid cell; the same rows and length with many and with few anchors share one.
        micro_batch: What it holds.
        few_anchors: Whether it gets fewer anchors than training would draw.
    """

    cell: int
    micro_batch: MicroBatch
    few_anchors: bool


@dataclass(frozen=True)
class _Budgets:
    """What a micro-batch may hold.

    Attributes:
        tokens: Tokens of each sample, those over the longest cut, shape ``(num_samples,)``.
        anchors: Its anchors, same shape.
        config: The budgets.
    """

    tokens: NDArray[np.int64]
    anchors: NDArray[np.int64]
    config: BatchingConfig

    def most_rows(self, ranked: NDArray[np.int64]) -> int:
        """Return how many rows like the last of these fit."""
        most = max(self.config.token_budget // int(self.tokens[ranked[-1]]), 1)
        most = min(most, self.config.max_samples or most)
        if self.config.anchor_budget is None:
            return most
        each = float(self.anchors[ranked[-most:]].mean())
        return min(most, max(int(self.config.anchor_budget / max(each, 1e-9)), 1))

    def fitting(self, members: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return samples until the next would overflow a budget, as the planner closes them."""
        number = np.arange(1, members.size + 1)
        fits = number * np.maximum.accumulate(self.tokens[members]) <= self.config.token_budget
        if self.config.max_samples is not None:
            fits &= number <= self.config.max_samples
        if self.config.anchor_budget is not None:
            fits &= np.cumsum(self.anchors[members]) <= self.config.anchor_budget
        return members[: max(int(fits.sum()), 1)]


def calibration_shapes(
    lengths: NDArray[np.int64],
    config: BatchingConfig,
    *,
    supervised: NDArray[np.int64],
    rng: np.random.Generator,
) -> list[Shape]:
    """Return one round of micro-batches; every round draws other samples of like lengths.

    Rows and lengths vary apart, with single rows and the budgets full among them; a few
    micro-batches hold samples of all lengths, as full shuffling makes them.

    Args:
        lengths: Length of each sample of the store, in tokens.
        config: The budgets, and whether samples that are too long are cut or left out.
        supervised: Supervised tokens of each sample.
        rng: Random stream; alike on every rank.

    Raises:
        CalibrationError: There is no sample, or none fits the budget.
    """
    max_length = min(config.max_length or config.token_budget, config.token_budget)
    truncates = config.oversize == "truncate"
    usable = np.flatnonzero((lengths > 0) & (truncates | (lengths <= max_length)))
    if usable.size == 0:
        raise CalibrationError(
            f"none of {lengths.size} samples can be timed within {config.token_budget:,} token "
            "slots; give a store that holds some, or raise batching.token_budget"
        )
    tokens = np.minimum(lengths, max_length)
    anchors = num_anchors(np.minimum(supervised, tokens), config.anchors)
    budgets = _Budgets(tokens, anchors, config)
    ranked = usable[np.argsort(lengths[usable], kind="stable")]
    groups = [*_regular(ranked, budgets, rng)]
    groups += [_mixed(usable, budgets, rng) for _ in range(NUM_MIXED)]
    shapes = []
    for cell, members in enumerate(groups):
        padded = int(tokens[members].max())
        batch = MicroBatch([[int(index)] for index in members], padded, max_length, 1.0, epoch=0)
        shapes += [Shape(cell, batch, few_anchors) for few_anchors in (False, True)]
    return shapes


def _regular(
    ranked: NDArray[np.int64], budgets: _Budgets, rng: np.random.Generator
) -> Iterator[NDArray[np.int64]]:
    """Yield rows of like length: one, half of what the budgets allow, all of it."""
    for quantile in LENGTH_QUANTILES:
        place = round(quantile * (ranked.size - 1))
        most = budgets.most_rows(ranked[: place + 1])
        for rows in sorted({1, max(most // 2, 1), most}):
            # A window below the place: nothing is longer, so the token budget holds.
            start = max(place + 1 - max(NEIGHBOURS, rows), 0)
            replace = rows > place + 1 - start
            yield budgets.fitting(rng.choice(ranked[start : place + 1], rows, replace=replace))


def _mixed(
    usable: NDArray[np.int64], budgets: _Budgets, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return samples as they come in a shuffle, until the next would overflow a budget."""
    return budgets.fitting(rng.choice(usable, min(usable.size, 4096), replace=False))
