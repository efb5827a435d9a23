"""Micro-batches as flat arrays, and the one rule that closes them."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dflash_core.compiled import compiled
from dflash_core.planning.config import BatchingConfig

__all__ = ["Batches", "Samples", "close_batches"]

UNLIMITED = 2**62


@dataclass(frozen=True)
class Samples:
    """What a strategy may know of the samples.

    Attributes:
        lengths: Usable lengths in tokens, int32, shape ``(num_samples,)``.
        anchors: Anchors of each sample, int32, same shape; empty when they are not budgeted.
    """

    lengths: NDArray[np.int32]
    anchors: NDArray[np.int32]

    @property
    def total_tokens(self) -> int:
        """Real tokens of all samples."""
        return int(self.lengths.sum(dtype=np.int64))


@dataclass(frozen=True)
class Batches:
    """Micro-batches, not yet spread over steps and ranks.

    Attributes:
        order: Sample indices, int32, shape ``(num_samples,)``.
        lengths: Their lengths in the same order, int32, same shape: read in sequence, where
            looking them up again would miss the cache.
        offsets: Micro-batch ``i`` holds ``order[offsets[i]:offsets[i + 1]]``, int64,
            shape ``(num_micro_batches + 1,)``.
        padded_lengths: Token slots of each row, int64, shape ``(num_micro_batches,)``.
        packed: Whether all samples of a micro-batch share one row.
    """

    order: NDArray[np.int32]
    lengths: NDArray[np.int32]
    offsets: NDArray[np.int64]
    padded_lengths: NDArray[np.int64]
    packed: bool = False

    @property
    def num_samples(self) -> NDArray[np.int64]:
        """Samples of each micro-batch, shape ``(num_micro_batches,)``."""
        return np.diff(self.offsets)

    @property
    def rows(self) -> NDArray[np.int64]:
        """Rows of each micro-batch, shape ``(num_micro_batches,)``."""
        return np.ones_like(self.padded_lengths) if self.packed else self.num_samples

    def keep(self, chosen: NDArray[np.bool_]) -> "Batches":
        """Return only the chosen micro-batches, in the same order."""
        sizes = self.num_samples
        kept = np.repeat(chosen, sizes)
        return replace(
            self,
            order=self.order[kept],
            lengths=self.lengths[kept],
            offsets=np.concatenate([[0], np.cumsum(sizes[chosen])]),
            padded_lengths=self.padded_lengths[chosen],
        )


def close_batches(
    order: NDArray[np.int32],
    samples: Samples,
    config: BatchingConfig,
    *,
    lengths: NDArray[np.int32] | None = None,
    groups: NDArray[np.int64] | None = None,
    edges: NDArray[np.int64] | None = None,
) -> Batches:
    """Cut an order of samples into micro-batches, each as full as the budgets allow.

    Args:
        order: Sample indices in the order in which they fill micro-batches.
        samples: Lengths and anchors.
        config: The budgets.
        lengths: Lengths in that order, when the caller has them at hand.
        groups: Offsets of groups that share no micro-batch, shape ``(num_groups + 1,)``.
        edges: Padded length of each group's rows, shape ``(num_groups,)``; the longest sample of
            the micro-batch when not given.
    """
    ordered = samples.lengths[order] if lengths is None else lengths
    borders = np.array([0, order.size]) if groups is None else groups
    fixed = np.zeros(borders.size - 1, dtype=np.int64) if edges is None else edges
    limits = (
        config.token_budget,
        UNLIMITED if config.max_samples is None else config.max_samples,
        UNLIMITED if config.anchor_budget is None else config.anchor_budget,
    )
    capacity = 4 * (samples.total_tokens // config.token_budget + fixed.size + 64)
    while True:
        offsets = np.empty(capacity + 1, dtype=np.int64)
        padded = np.empty(capacity, dtype=np.int64)
        multiple = config.multiple_of
        count = _close(
            order, ordered, samples.anchors, borders, fixed, *limits, multiple, offsets, padded
        )
        if count >= 0:
            return Batches(order, ordered, offsets[: count + 1].copy(), padded[:count].copy())
        capacity = min(4 * capacity, order.size)


@compiled
def _close(
    order,
    lengths,
    anchors,
    borders,
    edges,
    token_budget,
    max_samples,
    anchor_budget,
    multiple_of,
    offsets,
    padded_lengths,
):
    count = 0
    offsets[0] = 0
    for group in range(edges.size):
        edge = edges[group]
        start = borders[group]
        longest = np.int64(0)
        num_anchors = np.int64(0)
        for position in range(borders[group], borders[group + 1]):
            length = edge
            if edge == 0:
                length = np.int64(lengths[position])
                if length < longest:
                    length = longest
                elif multiple_of > 1:
                    length = (length + multiple_of - 1) // multiple_of * multiple_of
            extra = np.int64(0)
            if anchors.size:
                extra = np.int64(anchors[order[position]])
            size = position - start + 1
            if size > 1 and (
                size * length > token_budget
                or size > max_samples
                or num_anchors + extra > anchor_budget
            ):
                if count == padded_lengths.size:
                    return -1
                padded_lengths[count] = longest
                count += 1
                offsets[count] = position
                start = position
                num_anchors = np.int64(0)
                if edge == 0:
                    length = np.int64(lengths[position])
                    if multiple_of > 1:
                        length = (length + multiple_of - 1) // multiple_of * multiple_of
            longest = length
            num_anchors += extra
        if borders[group + 1] > borders[group]:
            if count == padded_lengths.size:
                return -1
            padded_lengths[count] = longest
            count += 1
            offsets[count] = borders[group + 1]
    return count
