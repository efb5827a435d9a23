"""From lengths to the histogram that every fit works on."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dflash_core.errors import ConfigError, DataError
from dflash_core.profiling import LengthProfile, screen_lengths

__all__ = ["Histogram", "histogram_of", "round_up"]

TABLE_LIMIT = 1 << 22


@dataclass(frozen=True)
class Histogram:
    """Distinct lengths in tokens, increasing, and how many samples have each."""

    lengths: NDArray[np.int64]
    counts: NDArray[np.int64]

    @property
    def total_tokens(self) -> int:
        """Real tokens of all samples."""
        return int(self.lengths @ self.counts)


def histogram_of(lengths: "ArrayLike | LengthProfile | Histogram") -> Histogram:
    """Count the samples of each length.

    Raises:
        DataError: No samples, or lengths that are not positive.
    """
    if isinstance(lengths, Histogram):
        return lengths
    if isinstance(lengths, LengthProfile):
        distinct, counts = lengths.lengths, lengths.counts
    else:
        values = screen_lengths(lengths).lengths
        if values.size and int(values.max()) < TABLE_LIMIT:
            table = np.bincount(values)
            distinct = np.flatnonzero(table)
            counts = table[distinct]
        else:
            distinct, counts = np.unique(values, return_counts=True)
    if not distinct.size:
        raise DataError("there are no lengths to fit buckets to; give at least one sample")
    return Histogram(distinct.astype(np.int64), counts.astype(np.int64))


def round_up(values: NDArray[np.int64], multiple_of: int) -> NDArray[np.int64]:
    """Round token counts up to a multiple."""
    if multiple_of < 1:
        raise ConfigError(f"multiple_of is {multiple_of}; give at least 1")
    return -(-values // multiple_of) * multiple_of
