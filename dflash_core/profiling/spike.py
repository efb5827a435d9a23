"""The mark of an earlier truncation: a pile of samples at exactly the maximum."""

import numpy as np
from numpy.typing import NDArray

from dflash_core.config import FrozenModel

__all__ = ["TruncationSpike", "find_spike"]

SPIKE_SHARE = 0.01
SPIKE_RATIO = 10


class TruncationSpike(FrozenModel):
    """Many samples at exactly the maximum: the mark of an earlier truncation."""

    length: int
    """The maximum, in tokens."""
    count: int
    """Samples of this length."""
    share: float
    """Share of all samples."""


def find_spike(lengths: NDArray[np.int64], counts: NDArray[np.int64]) -> TruncationSpike | None:
    """Return the pile at the maximum, when it is no part of the tail.

    At least 1 % of the samples sit exactly there, ten times what the average length of the upper
    half of the range holds.

    Args:
        lengths: Distinct lengths in tokens, increasing, shape ``(num_distinct,)``.
        counts: Samples of each, same shape.

    Example:
        >>> find_spike(np.array([10, 90, 100]), np.array([50, 1, 49])).count
        49
    """
    if lengths.size < 2:
        return None
    top, count = int(lengths[-1]), int(counts[-1])
    middle = (int(lengths[0]) + top) // 2
    tail = int(counts[(lengths > middle) & (lengths < top)].sum())
    density = tail / max(top - 1 - middle, 1)
    share = count / int(counts.sum())
    if share < SPIKE_SHARE or count < SPIKE_RATIO * density:
        return None
    return TruncationSpike(length=top, count=count, share=share)
