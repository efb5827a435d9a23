"""``packed``: whole samples share one row, with document boundaries and next to no padding.

Each row is filled with random samples until the next one would leave less than a mean length;
the rest is closed exactly: by one sample of that very length, or by a random one that leaves a
length which is in stock. Stock is kept by distinct length, so a look-up is a binary search. The
last fiftieth of the tokens, where stock thins out, goes largest first.
"""

import numpy as np
from numpy.typing import NDArray

from dflash_core.bucketing import histogram_of
from dflash_core.compiled import compiled
from dflash_core.planning.batches import UNLIMITED, Batches, Samples
from dflash_core.planning.config import BatchingConfig
from dflash_core.planning.shuffling import shuffled

__all__ = ["plan_packed"]

TABLE_LIMIT = 1 << 22
TAIL_ROWS = 64


def plan_packed(samples: Samples, config: BatchingConfig, rng: np.random.Generator) -> Batches:
    """Pack whole samples into rows of at most ``token_budget`` slots."""
    histogram = histogram_of(samples.lengths)
    stream = shuffled(samples.lengths.size, rng)
    classes = _classes(samples.lengths, histogram.lengths)
    listed = _by_class(stream, classes, _starts(histogram.counts))
    offsets = np.empty(samples.lengths.size + 1, dtype=np.int64)
    order, count = _pack(
        stream,
        listed,
        _starts(histogram.counts),
        classes,
        histogram.lengths,
        histogram.counts.copy(),
        samples.anchors,
        config.token_budget // config.multiple_of * config.multiple_of,
        UNLIMITED if config.max_samples is None else config.max_samples,
        UNLIMITED if config.anchor_budget is None else config.anchor_budget,
        histogram.total_tokens // stream.size,
        min(TAIL_ROWS * config.token_budget, histogram.total_tokens // 50),
        histogram.total_tokens,
        offsets,
    )
    ordered = samples.lengths[order]
    row_tokens = np.add.reduceat(ordered, offsets[:count], dtype=np.int64)
    padded = -(-row_tokens // config.multiple_of) * config.multiple_of
    return Batches(order, ordered, offsets[: count + 1].copy(), padded, packed=True)


def _starts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts[:-1])])


def _classes(lengths: NDArray[np.int32], sizes: NDArray[np.int64]) -> NDArray[np.int32]:
    if sizes[-1] >= TABLE_LIMIT:
        return np.searchsorted(sizes, lengths).astype(np.int32)
    table = np.zeros(int(sizes[-1]) + 1, dtype=np.int32)
    table[sizes] = np.arange(sizes.size, dtype=np.int32)
    return table[lengths]


@compiled
def _by_class(stream, classes, heads):
    listed = np.empty_like(stream)
    for sample in stream:
        listed[heads[classes[sample]]] = sample
        heads[classes[sample]] += 1
    return listed


@compiled
def _fitting(sizes, gap):
    """Return how many classes are no longer than the gap."""
    low, high = 0, sizes.size
    while low < high:
        middle = (low + high) // 2
        if sizes[middle] <= gap:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _in_stock(below, number):
    """Return the largest class up to ``number`` with samples left (1-based), or 0."""
    while below[number] != number:
        below[number] = below[below[number]]
        number = below[number]
    return number


@compiled
def _first_of(number, heads, listed, used):
    while used[listed[heads[number]]]:
        heads[number] += 1
    return listed[heads[number]]


@compiled
def _first_half_of_pair(stream, position, used, classes, sizes, left, below, gap):
    """Return a sample soon due that leaves a length in stock, or -1."""
    for place in range(position, min(position + 64, stream.size)):
        sample = stream[place]
        number = classes[sample]
        rest = gap - sizes[number]
        if used[sample] or rest < sizes[0]:
            continue
        other = _in_stock(below, _fitting(sizes, rest))
        if other and sizes[other - 1] == rest and (other - 1 != number or left[number] > 1):
            return sample
    return -1


@compiled
def _pack(
    stream,
    listed,
    heads,
    classes,
    sizes,
    left,
    anchors,
    capacity,
    max_samples,
    anchor_budget,
    mean,
    tail_tokens,
    remaining,
    offsets,
):
    order = np.empty_like(stream)
    used = np.zeros(stream.size, dtype=np.uint8)
    below = np.arange(sizes.size + 1)
    offsets[0] = 0
    filled, position, count = 0, 0, 0
    gap, num_anchors = capacity, np.int64(0)
    while filled < stream.size:
        while used[stream[position]]:
            position += 1
        sample = -1
        fitting = _in_stock(below, _fitting(sizes, gap))
        if fitting:
            if remaining > tail_tokens and gap - sizes[classes[stream[position]]] >= mean:
                sample = stream[position]
            elif remaining > tail_tokens and sizes[fitting - 1] != gap:
                sample = _first_half_of_pair(
                    stream, position, used, classes, sizes, left, below, gap
                )
            if sample < 0:
                sample = _first_of(fitting - 1, heads, listed, used)
        extra = np.int64(0)
        if sample >= 0 and anchors.size:
            extra = np.int64(anchors[sample])
        size = filled - offsets[count]
        full = size > 0 and (size == max_samples or num_anchors + extra > anchor_budget)
        if sample < 0 or full:
            count += 1
            offsets[count] = filled
            gap, num_anchors = capacity, np.int64(0)
            continue
        number = classes[sample]
        used[sample] = 1
        left[number] -= 1
        if left[number] == 0:
            below[number + 1] = number
        order[filled] = sample
        filled += 1
        gap -= sizes[number]
        num_anchors += extra
        remaining -= sizes[number]
    offsets[count + 1] = filled
    return order, count + 1
