"""How much of everything each micro-batch of a plan holds: what the cost terms multiply."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dflash_core.compiled import compiled
from dflash_core.errors import CalibrationError
from dflash_core.planning import EpochPlan, num_anchors
from dflash_core.throughput.cost import Measurement

__all__ = ["Workload"]


@dataclass(frozen=True)
class Workload:
    """Amounts per micro-batch, float64, shape ``(num_micro_batches,)`` each.

    Attributes:
        documents: Documents.
        slots: Token slots, padding included.
        slot_lengths: Sum over the slots of the tokens each attends to.
        tokens: Real tokens.
        anchor_tokens: Anchors times block size.
        anchor_contexts: Sum over documents of anchor tokens times document length.
    """

    documents: NDArray[np.float64]
    slots: NDArray[np.float64]
    slot_lengths: NDArray[np.float64]
    tokens: NDArray[np.float64]
    anchor_tokens: NDArray[np.float64]
    anchor_contexts: NDArray[np.float64]

    @classmethod
    def of_plan(
        cls, plan: EpochPlan, *, block_size: int, attends_documents_only: bool = False
    ) -> "Workload":
        """Count what a plan's micro-batches hold; it does not depend on steps and ranks.

        Args:
            plan: The plan, made with supervised tokens.
            block_size: Block size of the drafter.
            attends_documents_only: Whether the target's attention skips what the mask of a
                packed row hides.

        Raises:
            CalibrationError: The plan knows no supervised tokens, so anchors are unknown.
        """
        identity = plan.identity
        if identity.supervised is None:
            raise CalibrationError(
                "the drafter's cost needs supervised tokens and these lengths come without; give a "
                "token store, or lengths with a column 'supervised'"
            )
        anchors = num_anchors(identity.supervised, identity.config.anchors)
        place = np.zeros(int(plan.order.max()) + 1, dtype=np.int64)
        if identity.kept is None:
            place = np.arange(identity.lengths.size)
        else:
            place[identity.kept[identity.kept < place.size]] = np.arange(
                int((identity.kept < place.size).sum())
            )
        contexts = _weighted_sums(plan.order, plan.offsets, place, anchors, identity.lengths)
        rows, padded = plan.rows.astype(np.float64), plan.padded_lengths.astype(np.float64)
        dense = rows * padded**2
        return cls(
            documents=np.diff(plan.offsets).astype(np.float64),
            slots=rows * padded,
            slot_lengths=plan.slot_lengths.astype(np.float64) if attends_documents_only else dense,
            tokens=plan.real_tokens.astype(np.float64),
            anchor_tokens=plan.num_anchors.astype(np.float64) * block_size,
            anchor_contexts=contexts * block_size,
        )

    @classmethod
    def of_measurements(cls, measurements: list[Measurement]) -> "Workload":
        """Count what timed micro-batches held."""
        columns = np.array(
            [
                (
                    m.rows,
                    m.rows * m.padded_length,
                    m.rows * m.padded_length**2,
                    m.real_tokens,
                    m.anchor_tokens,
                    m.anchor_contexts,
                )
                for m in measurements
            ],
            dtype=np.float64,
        ).reshape(-1, 6)
        return cls(*columns.T)

    @cached_property
    def amounts(self) -> dict[str, NDArray[np.float64]]:
        """What each field of `Coefficients` multiplies."""
        return {
            "constant_s": np.ones_like(self.slots),
            "document_s": self.documents,
            "slot_s": self.slots,
            "slot_length_s": self.slot_lengths,
            "token_s": self.tokens,
            "anchor_token_s": self.anchor_tokens,
            "anchor_context_s": self.anchor_contexts,
        }

    @cached_property
    def totals(self) -> dict[str, NDArray[np.float64]]:
        """Sums of `amounts` over all micro-batches, shape ``()`` each."""
        return {name: np.asarray(values.sum()) for name, values in self.amounts.items()}


@compiled
def _weighted_sums(order, offsets, place, weights, lengths):
    sums = np.zeros(offsets.size - 1, dtype=np.float64)
    for index in range(sums.size):
        for position in range(offsets[index], offsets[index + 1]):
            sample = place[order[position]]
            sums[index] += np.float64(weights[sample]) * np.float64(lengths[sample])
    return sums
