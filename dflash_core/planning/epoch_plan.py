"""The epoch plan: every micro-batch of an epoch, its step and its rank, known before it starts."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dflash_core.planning.cost import PlanCost
from dflash_core.planning.identity import PlanIdentity

__all__ = ["EpochPlan"]


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """A value: three flat arrays and what follows from them.

    Attributes:
        order: Sample indices into the given lengths, int32, shape ``(num_planned,)``.
        offsets: Micro-batch ``i`` holds ``order[offsets[i]:offsets[i + 1]]``, int64, shape
            ``(num_micro_batches + 1,)``.
        padded_lengths: Token slots of each row, int64, shape ``(num_micro_batches,)``.
        rows: Rows of each micro-batch, same shape; its samples, or 1 when packed.
        real_tokens: Tokens of each micro-batch's samples, same shape.
        slot_lengths: Sum over the slots of the tokens each attends to, same shape: ``rows *
            padded_lengths**2``, or the sum of squared lengths when packed.
        num_anchors: Anchors of each micro-batch, same shape; 0 without supervised tokens.
        supervised_tokens: Supervised tokens of each micro-batch, same shape; 0 when not given.
        assignment: Micro-batch of each step, accumulation slot and rank, -1 = idle; int64, shape
            ``(num_steps, accumulation, world_size)``.
        loss_weight: 1 where a micro-batch counts, 0 for fill-up repeats and idle slots; float64,
            same shape.
        packed: Whether all samples of a micro-batch share one row.
        max_length: Longer samples are cut to this many tokens.
        dropped: Samples left out, by reason.
        num_truncated: Samples cut to ``max_length``.
        num_repeats: Micro-batches that fill the last step with weight 0.
        identity: What the hashes are made of.
    """

    order: NDArray[np.int32]
    offsets: NDArray[np.int64]
    padded_lengths: NDArray[np.int64]
    rows: NDArray[np.int64]
    real_tokens: NDArray[np.int64]
    slot_lengths: NDArray[np.int64]
    num_anchors: NDArray[np.int64]
    supervised_tokens: NDArray[np.int64]
    assignment: NDArray[np.int64]
    loss_weight: NDArray[np.float64]
    packed: bool
    max_length: int
    dropped: dict[str, int]
    num_truncated: int
    num_repeats: int
    identity: PlanIdentity = field(repr=False)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of the epoch, repeats not counted."""
        return self.padded_lengths.size

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the epoch."""
        return self.assignment.shape[0]

    @property
    def num_samples(self) -> int:
        """Samples trained on, each once."""
        return self.order.size

    @property
    def num_dropped(self) -> int:
        """Samples left out, for any reason."""
        return sum(self.dropped.values())

    @property
    def slots(self) -> NDArray[np.int64]:
        """Token slots of each micro-batch, shape ``(num_micro_batches,)``."""
        return self.rows * self.padded_lengths

    @property
    def total_tokens(self) -> int:
        """Real tokens of the epoch."""
        return int(self.real_tokens.sum())

    @property
    def padding_efficiency(self) -> float:
        """Real tokens / token slots, in (0, 1]; weight-0 copies hold slots and no real tokens."""
        run = self.assignment[self.assignment >= 0]
        return self.total_tokens / int(self.slots[run].sum())

    @property
    def content_hash(self) -> str:
        """What is trained on, and in which step: a resume needs the same one."""
        return self.identity.content_hash

    @property
    def layout_hash(self) -> str:
        """Who runs it: may change on resume."""
        return self.identity.layout_hash

    def micro_batch(self, index: int) -> NDArray[np.int64]:
        """Return the samples of a micro-batch, int64, shape ``(n,)``."""
        start, stop = self._bounds(index)
        return self.order[start:stop].astype(np.int64)

    def padded_length(self, index: int) -> int:
        """Return the token slots of each of its rows."""
        self._bounds(index)
        return int(self.padded_lengths[index])

    def document_rows(self, index: int) -> NDArray[np.int64]:
        """Return the row that each sample of a micro-batch sits in, shape ``(n,)``.

        Packed samples follow each other in row 0 in the order of `micro_batch`.
        """
        start, stop = self._bounds(index)
        count = stop - start
        return np.zeros(count, dtype=np.int64) if self.packed else np.arange(count)

    def costs(self, cost: PlanCost | None = None) -> NDArray[np.int64]:
        """Return the cost of each micro-batch; under the plan's own measure when not given."""
        measure = self.identity.cost if cost is None else cost
        return measure.of(
            self.rows, self.padded_lengths, self.num_anchors, slot_lengths=self.slot_lengths
        )

    @cached_property
    def step_of(self) -> NDArray[np.int64]:
        """Step that each micro-batch counts in, shape ``(num_micro_batches,)``."""
        steps = np.full(self.num_micro_batches, -1, dtype=np.int64)
        step, slot, rank = np.nonzero(self.loss_weight)
        steps[self.assignment[step, slot, rank]] = step
        return steps

    def _bounds(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self.num_micro_batches:
            raise IndexError(f"micro-batch {index} of a plan with {self.num_micro_batches}")
        return int(self.offsets[index]), int(self.offsets[index + 1])
