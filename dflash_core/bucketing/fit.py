"""Bucket edges: which lengths share a shape."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dflash_core.bucketing.histogram import Histogram, histogram_of, round_up
from dflash_core.bucketing.slots import best_slot_edges
from dflash_core.errors import ConfigError
from dflash_core.profiling import LengthProfile

__all__ = ["fit_buckets"]


def fit_buckets(
    lengths: "ArrayLike | LengthProfile | Histogram", *, num_buckets: int, multiple_of: int = 1
) -> NDArray[np.int64]:
    """Return the bucket edges that minimise total token slots.

    A sample of length ``n`` is padded to the first edge that is at least ``n``. Exact, by divide
    and conquer over the ``m`` distinct rounded lengths: O(num_buckets * m log m).

    Args:
        lengths: Sequence lengths in tokens, shape ``(num_samples,)``, all positive, or their
            profile.
        num_buckets: Most edges to return; fewer when the data has fewer distinct lengths.
        multiple_of: Edges are rounded up to this many tokens.

    Returns:
        Increasing edges in tokens, shape ``(k,)`` with ``k <= num_buckets``.

    Raises:
        ConfigError: A count is below 1.
        DataError: ``lengths`` is empty or not positive.

    Example:
        >>> fit_buckets(np.array([60, 64, 120, 500]), num_buckets=2)
        array([120, 500])
    """
    if num_buckets < 1:
        raise ConfigError(f"num_buckets is {num_buckets}; give at least 1")
    histogram = histogram_of(lengths)
    edges, counts = merge_to(round_up(histogram.lengths, multiple_of), histogram.counts)
    chosen, _ = best_slot_edges(edges, counts, min(num_buckets, edges.size))
    return edges[chosen]


def merge_to(
    edges: NDArray[np.int64], counts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sum the counts of equal neighbours in a non-decreasing list of candidate edges."""
    starts = np.flatnonzero(np.concatenate([[True], edges[1:] != edges[:-1]]))
    return edges[starts], np.add.reduceat(counts, starts)
