"""Uniform shuffles and stable sorts of sample order, in linear time and few bytes."""

import numpy as np
from numpy.typing import NDArray

from dflash_core.compiled import compiled

__all__ = ["random_stream", "shuffle_segments", "shuffled", "sort_pools"]

BLOCK = 1 << 19
CHUNK = 1 << 18


def random_stream(seed: int, epoch: int, purpose: int) -> np.random.Generator:
    """Return the generator of one purpose in one epoch; streams do not overlap."""
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence([seed, epoch, purpose])))


def shuffled(num_samples: int, rng: np.random.Generator) -> NDArray[np.int32]:
    """Return a uniform permutation, int32, shape ``(num_samples,)``."""
    order = np.arange(num_samples, dtype=np.int32)
    shuffle_segments(order, np.array([0, num_samples]), rng)
    return order


def shuffle_segments(
    order: NDArray[np.int32], offsets: NDArray[np.int64], rng: np.random.Generator
) -> None:
    """Shuffle each segment in place.

    A segment beyond the cache is first dealt at random into blocks and the blocks are shuffled,
    which is a uniform shuffle too (Rao 1961, Sandelius 1962) and touches memory in order.
    """
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        size = stop - start
        if size <= BLOCK:
            _fisher_yates(order[start:stop], rng.random(size))
            continue
        segment = order[start:stop]
        blocks = _deal(segment, -(-size // (BLOCK // 2)), rng)
        for low, high in zip(blocks[:-1].tolist(), blocks[1:].tolist(), strict=True):
            _fisher_yates(segment[low:high], rng.random(high - low))


def sort_pools(order: NDArray[np.int32], ordered: NDArray[np.int32], pool_size: int) -> None:
    """Sort consecutive pools by length in place, stably, every second one descending.

    Neighbouring pools then meet at like lengths, so micro-batches run on across their border.

    Args:
        order: Sample indices, shape ``(num_samples,)``.
        ordered: Their lengths, same shape; sorted along.
        pool_size: Samples of a pool.
    """
    if order.size:
        low, high = int(ordered.min()), int(ordered.max())
        _radix_pools(order, ordered, min(pool_size, order.size), low, (high - low).bit_length())


def _deal(
    segment: NDArray[np.int32], num_blocks: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    block = np.empty(segment.size, dtype=np.uint16)
    for start in range(0, segment.size, CHUNK):
        stop = min(start + CHUNK, segment.size)
        block[start:stop] = rng.integers(0, num_blocks, stop - start, dtype=np.uint16)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(block, minlength=num_blocks))])
    segment[:] = _scatter(segment, block, offsets)
    return offsets


@compiled
def _scatter(segment, block, offsets):
    heads = offsets.copy()
    dealt = np.empty_like(segment)
    for position in range(segment.size):
        number = block[position]
        dealt[heads[number]] = segment[position]
        heads[number] += 1
    return dealt


@compiled
def _fisher_yates(segment, draws):
    for last in range(segment.size - 1, 0, -1):
        other = int(draws[last] * (last + 1))
        kept = segment[last]
        segment[last] = segment[other]
        segment[other] = kept


@compiled
def _radix_pools(order, ordered, pool_size, low, num_bits):
    num_passes = max((num_bits + 7) // 8, 1)
    digit_bits = max((num_bits + num_passes - 1) // num_passes, 1)
    mask = (1 << digit_bits) - 1
    keys = np.empty((2, pool_size), dtype=np.int32)
    values = np.empty((2, pool_size), dtype=np.int32)
    heads = np.empty(mask + 2, dtype=np.int64)
    for pool in range((order.size + pool_size - 1) // pool_size):
        start = pool * pool_size
        size = min(pool_size, order.size - start)
        for position in range(size):
            values[0, position] = order[start + position]
            keys[0, position] = ordered[start + position] - low
        side = 0
        for number in range(num_passes):
            shift = number * digit_bits
            for digit in range(mask + 2):
                heads[digit] = 0
            for position in range(size):
                heads[((keys[side, position] >> shift) & mask) + 1] += 1
            for digit in range(1, mask + 2):
                heads[digit] += heads[digit - 1]
            for position in range(size):
                digit = (keys[side, position] >> shift) & mask
                keys[1 - side, heads[digit]] = keys[side, position]
                values[1 - side, heads[digit]] = values[side, position]
                heads[digit] += 1
            side = 1 - side
        for position in range(size):
            source = size - 1 - position if pool % 2 else position
            order[start + position] = values[side, source]
            ordered[start + position] = keys[side, source] + low
