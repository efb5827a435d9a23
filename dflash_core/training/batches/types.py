"""Which samples run together, and their tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dflash_core.corpus.store import Sample, TokenStore

__all__ = ["MicroBatch", "read_rows"]


@dataclass(frozen=True)
class MicroBatch:
    """Which samples run together.

    Attributes:
        rows: Sample indices of each row: one, or several when packed.
        padded_length: Token slots of a row.
        max_length: Longer samples are cut to this many tokens.
        weight: Factor on its loss; 0 for a repeat that only fills a step.
        epoch: Epoch, from which anchors are drawn.
        held_out: Whether the indices are of the held-out store.
        every: Only every so many-th token of each sample is there; 1 in training, more where it
            is seen how much memory a part needs.
    """

    rows: Sequence[Sequence[int]]
    padded_length: int
    max_length: int
    weight: float
    epoch: int
    held_out: bool = False
    every: int = 1

    @property
    def samples(self) -> list[int]:
        """Sample indices in the order of their tokens."""
        return [index for row in self.rows for index in row]


def read_rows(micro_batch: MicroBatch, store: TokenStore) -> list[list[Sample]]:
    """Read the samples of each row, cut to the plan's longest length."""
    kept = slice(None, micro_batch.max_length, micro_batch.every)
    return [[_cut(store[index], kept) for index in row] for row in micro_batch.rows]


def _cut(sample: Sample, kept: slice) -> Sample:
    if kept.step == 1 and len(sample.input_ids) <= kept.stop:
        return sample
    return replace(sample, input_ids=sample.input_ids[kept], loss_mask=sample.loss_mask[kept])
