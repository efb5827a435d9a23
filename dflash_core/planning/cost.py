"""What a micro-batch costs, in integers: the measure that balances ranks."""

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dflash_core.config import FrozenModel

__all__ = ["PlanCost"]


class PlanCost(FrozenModel):
    """Integer coefficients, so that plans are the same bytes on every machine.

    The default is ``slots * (1 + padded_length / 3000)`` in units of 1/3000 slot.
    """

    per_micro_batch: int = Field(default=0, ge=0, le=2**40)
    """Cost of any micro-batch."""
    per_slot: int = Field(default=3_000, ge=0, le=2**24)
    """Cost of one token slot."""
    per_slot_length: int = Field(default=1, ge=0, le=2**16)
    """Cost of one token slot for each token of the row it attends to."""
    per_anchor: int = Field(default=0, ge=0, le=2**24)
    """Cost of one anchor."""

    def of(
        self,
        rows: NDArray[np.int64],
        padded_length: NDArray[np.int64],
        num_anchors: NDArray[np.int64] | int = 0,
        *,
        slot_lengths: NDArray[np.int64] | None = None,
    ) -> NDArray[np.int64]:
        """Return the cost of micro-batches of ``rows`` rows of ``padded_length`` slots.

        Args:
            rows: Rows, shape ``(num_micro_batches,)``.
            padded_length: Slots of each row, same shape.
            num_anchors: Anchors of each micro-batch, same shape.
            slot_lengths: Sum over the slots of the tokens each attends to; with documents packed
                into a row this is the sum of squared lengths. ``rows * padded_length**2`` when
                not given.

        Example:
            >>> PlanCost().of(np.array([2]), np.array([3000]))
            array([36000000])
        """
        slots = rows * padded_length
        attended = slots * padded_length if slot_lengths is None else slot_lengths
        return (
            self.per_micro_batch
            + self.per_slot * slots
            + self.per_slot_length * attended
            + self.per_anchor * np.asarray(num_anchors, dtype=np.int64)
        )
