"""Edges for any cost of a bucket: exact over a limited list of candidates.

A cost with a whole number of micro-batches breaks the quadrangle inequality, so every pair of
candidates is priced and every layer tries every predecessor: O(K n^2) for n candidates.
"""

import numpy as np
from numpy.typing import NDArray

from dflash_core.bucketing.config import ShapeCost
from dflash_core.compiled import compiled

__all__ = ["batch_maximum_costs", "best_dense_edges", "lower_bound_costs", "shape_costs"]


def best_dense_edges(
    costs: NDArray[np.float64], num_buckets: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the chosen candidates and the optimum for every number of buckets.

    Args:
        costs: ``costs[i, j]`` is the cost of one bucket with candidates ``i`` to ``j``, shape
            ``(n, n)``; only ``i <= j`` is read.
        num_buckets: Most buckets, at most ``n``. More are never worse than fewer only if they
            cost nothing themselves, so the best number up to this one is chosen.

    Returns:
        Positions of the chosen edges, increasing; optimum of exactly 1, 2, ... ``num_buckets``
        buckets, shape ``(num_buckets,)``.
    """
    choice = np.zeros((num_buckets, costs.shape[0]), dtype=np.int32)
    optima = _solve_dense(costs, choice)
    layer = int(np.argmin(optima))
    chosen = []
    position = costs.shape[0] - 1
    for number in range(layer, -1, -1):
        chosen.append(position)
        position = int(choice[number, position]) - 1
    return np.array(chosen[::-1], dtype=np.int64), optima


def shape_costs(
    edges: NDArray[np.int64], counts: NDArray[np.int64], cost: ShapeCost, token_budget: int
) -> NDArray[np.float64]:
    """Price buckets padded to their edge, micro-batches counted as whole ones."""
    rows = token_budget // edges
    below = np.concatenate([[0], np.cumsum(counts)])
    held = below[None, 1:] - below[:-1, None]
    per_sample = cost.per_slot * edges + cost.per_slot_length * edges.astype(np.float64) ** 2
    return held * per_sample + cost.per_micro_batch * -(-held // rows)


def lower_bound_costs(
    lowest: NDArray[np.int64], counts: NDArray[np.int64], cost: ShapeCost, token_budget: int
) -> NDArray[np.float64]:
    """Price buckets so that no edge between two candidates can be cheaper.

    Any edge in a candidate's interval is at least the interval's lowest length, and micro-batches
    are at least a fraction each: the optimum over these is a bound for all edges there are.
    """
    rows = token_budget // lowest
    below = np.concatenate([[0], np.cumsum(counts)])
    held = below[None, 1:] - below[:-1, None]
    per_sample = (
        cost.per_slot * lowest
        + cost.per_slot_length * lowest.astype(np.float64) ** 2
        + cost.per_micro_batch / rows
    )
    return held * per_sample


def batch_maximum_costs(
    edges: NDArray[np.int64],
    counts: NDArray[np.int64],
    mean_lengths: NDArray[np.float64],
    token_budget: int,
) -> NDArray[np.float64]:
    """Price buckets padded to the micro-batch's longest sample.

    That is the expected maximum of ``floor(budget / edge)`` draws from the bucket, for every
    sample; draws are taken as independent.
    """
    return _expected_slots(
        counts.astype(np.float64), mean_lengths, (token_budget // edges).astype(np.float64)
    )


@compiled
def _solve_dense(costs, choice):
    num_layers, size = choice.shape
    optima = np.empty(num_layers)
    previous = np.empty(size)
    current = np.empty(size)
    for last in range(size):
        previous[last] = costs[0, last]
    optima[0] = previous[size - 1]
    for layer in range(1, num_layers):
        for last in range(size):
            current[last] = np.inf
        # Row by row, so that the table is read in the order in which it lies in memory.
        for start in range(layer, size):
            base = previous[start - 1]
            for last in range(start, size):
                total = base + costs[start, last]
                if total < current[last]:
                    current[last] = total
                    choice[layer, last] = start
        for last in range(size):
            previous[last] = current[last]
        optima[layer] = previous[size - 1]
    return optima


@compiled
def _expected_slots(counts, lengths, rows):
    size = counts.size
    below = np.zeros(size + 1)
    for number in range(size):
        below[number + 1] = below[number] + counts[number]
    # logs[i, j]: logarithm of the samples in candidates i to j, so that a power is one exp.
    logs = np.zeros((size, size))
    for first in range(size):
        for last in range(first, size):
            logs[first, last] = np.log(below[last + 1] - below[first])
    costs = np.zeros((size, size))
    for last in range(size):
        for first in range(last + 1):
            held = below[last + 1] - below[first]
            draws = min(rows[last], held)
            expected = 0.0
            reached = 1.0
            for number in range(last, first - 1, -1):
                before = 0.0
                if number > first:
                    before = np.exp(draws * (logs[first, number - 1] - logs[first, last]))
                expected += lengths[number] * (reached - before)
                reached = before
                if before < 1e-7:
                    break
            costs[first, last] = held * expected
    return costs
