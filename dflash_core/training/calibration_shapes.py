"""Which micro-batches a calibration times: real samples, on a grid that keeps the terms apart."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_core.errors import CalibrationError
from dflash_core.training.objective import MicroBatch

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


def calibration_shapes(
    lengths: NDArray[np.int64],
    *,
    token_budget: int,
    max_length: int,
    truncates: bool,
    rng: np.random.Generator,
) -> list[Shape]:
    """Return one round of micro-batches; every round draws other samples of like lengths.

    Rows and lengths vary apart, with single rows and the budget full among them; a few
    micro-batches hold samples of all lengths, as full shuffling makes them.

    Args:
        lengths: Length of each sample of the store, in tokens.
        token_budget: Most token slots of a micro-batch.
        max_length: Longest sample in tokens.
        truncates: Whether longer samples are cut; otherwise they are left out.
        rng: Random stream; alike on every rank.

    Raises:
        CalibrationError: There is no sample, or none fits the budget.
    """
    max_length = min(max_length, token_budget)
    usable = np.flatnonzero((lengths > 0) & (truncates | (lengths <= max_length)))
    if usable.size == 0:
        raise CalibrationError(
            f"none of {lengths.size} samples can be timed within {token_budget:,} token slots; "
            "give a store that holds some, or raise batching.token_budget"
        )
    ranked = usable[np.argsort(lengths[usable], kind="stable")]
    groups = [*_regular(ranked, lengths, token_budget, max_length, rng)]
    groups += [_mixed(usable, lengths, token_budget, max_length, rng) for _ in range(NUM_MIXED)]
    shapes = []
    for cell, members in enumerate(groups):
        padded = int(np.minimum(lengths[members], max_length).max())
        batch = MicroBatch([[int(index)] for index in members], padded, max_length, 1.0, epoch=0)
        shapes += [Shape(cell, batch, few_anchors) for few_anchors in (False, True)]
    return shapes


def _regular(
    ranked: NDArray[np.int64],
    lengths: NDArray[np.int64],
    token_budget: int,
    max_length: int,
    rng: np.random.Generator,
) -> Iterator[NDArray[np.int64]]:
    """Yield rows of like length: one, half the budget, the whole budget."""
    for quantile in LENGTH_QUANTILES:
        place = round(quantile * (ranked.size - 1))
        length = min(int(lengths[ranked[place]]), max_length)
        most = max(token_budget // length, 1)
        for rows in sorted({1, max(most // 2, 1), most}):
            # A window below the place: nothing is longer, so the budget holds.
            start = max(place + 1 - max(NEIGHBOURS, rows), 0)
            yield rng.choice(ranked[start : place + 1], rows, replace=rows > place + 1 - start)


def _mixed(
    usable: NDArray[np.int64],
    lengths: NDArray[np.int64],
    token_budget: int,
    max_length: int,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Return samples as they come in a shuffle, until the next would overflow the budget."""
    drawn = rng.choice(usable, min(usable.size, 4096), replace=False)
    tokens = np.minimum(lengths[drawn], max_length)
    slots = np.arange(1, drawn.size + 1) * np.maximum.accumulate(tokens)
    return drawn[: max(int((slots <= token_budget).sum()), 1)]
