"""Edges that others use, to compare with: quantiles, token mass, and what given edges are worth."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dflash_core.bucketing.histogram import Histogram, histogram_of
from dflash_core.errors import ConfigError
from dflash_core.profiling import LengthProfile

__all__ = ["edge_efficiency", "quantile_edges", "token_mass_edges"]

Lengths = "ArrayLike | LengthProfile | Histogram"


def quantile_edges(
    lengths: "ArrayLike | LengthProfile | Histogram", *, num_buckets: int
) -> NDArray[np.int64]:
    """Return edges with as many samples in each bucket as ties allow.

    Example:
        >>> quantile_edges([1, 2, 3, 4, 5, 60], num_buckets=3)
        array([ 2,  4, 60])
    """
    histogram = histogram_of(lengths)
    return _equal_parts(histogram.lengths, histogram.counts, num_buckets)


def token_mass_edges(
    lengths: "ArrayLike | LengthProfile | Histogram", *, num_buckets: int
) -> NDArray[np.int64]:
    """Return edges with as many tokens in each bucket as ties allow.

    Example:
        >>> token_mass_edges([1, 2, 3, 4, 5, 60], num_buckets=3)
        array([60])
    """
    histogram = histogram_of(lengths)
    return _equal_parts(histogram.lengths, histogram.counts * histogram.lengths, num_buckets)


def edge_efficiency(lengths: "ArrayLike | LengthProfile | Histogram", edges: ArrayLike) -> float:
    """Return real tokens / token slots when each sample is padded to its edge.

    Raises:
        ConfigError: The longest sample exceeds the last edge.
    """
    histogram = histogram_of(lengths)
    bounds = np.asarray(edges, dtype=np.int64)
    if not bounds.size or histogram.lengths[-1] > bounds[-1]:
        last = int(bounds[-1]) if bounds.size else 0
        raise ConfigError(
            f"the longest sample has {int(histogram.lengths[-1]):,} tokens but the last edge is "
            f"{last:,}; raise the last of edges"
        )
    padded = bounds[np.searchsorted(bounds, histogram.lengths)]
    return histogram.total_tokens / int(padded @ histogram.counts)


def _equal_parts(
    lengths: NDArray[np.int64], mass: NDArray[np.int64], num_buckets: int
) -> NDArray[np.int64]:
    if num_buckets < 1:
        raise ConfigError(f"num_buckets is {num_buckets}; give at least 1")
    reached = np.cumsum(mass)
    total = int(reached[-1])
    wanted = np.array([total * part // num_buckets for part in range(1, num_buckets + 1)])
    return np.unique(lengths[np.searchsorted(reached, wanted)])
