"""Edges that minimise token slots: exact, by divide and conquer over the histogram.

The cost of one bucket, edge x (samples up to the edge - samples up to the previous edge), obeys
the quadrangle inequality: the best previous edge never moves down as the edge moves up. Each of
the K layers therefore takes O(n log n) for n distinct lengths.
"""

import numpy as np
from numpy.typing import NDArray

from dflash_core.compiled import compiled

__all__ = ["best_slot_edges"]


def best_slot_edges(
    edges: NDArray[np.int64], counts: NDArray[np.int64], num_buckets: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return positions of the chosen edges and the optimum for every number of buckets.

    Args:
        edges: Candidate edges, increasing, the last one holding the longest sample, shape ``(n,)``.
        counts: Samples whose first candidate is this one, shape ``(n,)``.
        num_buckets: Most edges, at least 1 and at most ``n``.

    Returns:
        Positions in ``edges``, increasing, shape ``(num_buckets,)``; slots of the best 1, 2, ...
        ``num_buckets`` edges, shape ``(num_buckets,)``.
    """
    below = np.concatenate([[0], np.cumsum(counts)])
    choice = np.zeros((num_buckets, edges.size), dtype=np.int32)
    optima = _solve(edges, below, choice)
    chosen = np.empty(num_buckets, dtype=np.int64)
    position = edges.size - 1
    for layer in range(num_buckets - 1, -1, -1):
        chosen[layer] = position
        position = int(choice[layer, position]) - 1
    return chosen, optima


@compiled
def _solve(edges, below, choice):
    num_layers, size = choice.shape
    optima = np.empty(num_layers, dtype=np.int64)
    previous = np.empty(size, dtype=np.int64)
    current = np.empty(size, dtype=np.int64)
    for position in range(size):
        previous[position] = edges[position] * below[position + 1]
    optima[0] = previous[size - 1]
    stack = np.empty((128, 4), dtype=np.int64)
    for layer in range(1, num_layers):
        # ``choice`` is the first distinct length inside the bucket; a bucket holds at least one.
        stack[0, 0], stack[0, 1], stack[0, 2], stack[0, 3] = layer, size - 1, layer, size - 1
        depth = 1
        while depth:
            depth -= 1
            low, high = stack[depth, 0], stack[depth, 1]
            first, last = stack[depth, 2], stack[depth, 3]
            middle = (low + high) // 2
            edge = edges[middle]
            best = np.int64(9223372036854775807)
            best_start = first
            for start in range(first, min(middle, last) + 1):
                cost = previous[start - 1] - edge * below[start]
                if cost < best:
                    best = cost
                    best_start = start
            current[middle] = best + edge * below[middle + 1]
            choice[layer, middle] = best_start
            if low < middle:
                stack[depth, 0], stack[depth, 1] = low, middle - 1
                stack[depth, 2], stack[depth, 3] = first, best_start
                depth += 1
            if middle < high:
                stack[depth, 0], stack[depth, 1] = middle + 1, high
                stack[depth, 2], stack[depth, 3] = best_start, last
                depth += 1
        for position in range(layer, size):
            previous[position] = current[position]
        optima[layer] = previous[size - 1]
    return optima
