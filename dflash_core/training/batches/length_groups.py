"""Groups of samples by length, by which losses are kept apart."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["NUM_GROUPS", "group_of", "length_edges"]

NUM_GROUPS = 6


def length_edges(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the inclusive upper bounds of length groups that hold equally many samples.

    Example:
        >>> length_edges(np.arange(1, 13))
        array([ 2,  4,  6,  8, 10, 12])
    """
    shares = np.arange(1, NUM_GROUPS + 1) / NUM_GROUPS
    return np.unique(np.quantile(lengths, shares, method="inverted_cdf").astype(np.int64))


def group_of(lengths: NDArray[np.int64], edges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the group of each length; the last one also takes what is longer."""
    return np.minimum(np.searchsorted(edges, lengths), len(edges) - 1)
