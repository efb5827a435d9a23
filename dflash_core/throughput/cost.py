"""What a micro-batch costs: four measured terms for each role."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dflash_core.config import FrozenModel

__all__ = ["Coefficients", "CostModel", "Fingerprint", "Measurement", "Role"]

Role = Literal["target", "draft"]


class Measurement(FrozenModel):
    """One timed micro-batch."""

    role: Role
    """What ran: a forward of the frozen target, or forward and backward of the drafter."""
    rows: int = Field(ge=1)
    """Rows of the micro-batch."""
    padded_length: int = Field(ge=1)
    """Token slots of a row."""
    anchor_tokens: int = Field(default=0, ge=0)
    """Anchors times block size."""
    seconds: float = Field(gt=0)
    """Median time with all ranks busy."""


class Coefficients(FrozenModel):
    """Seconds of a micro-batch as a sum of non-negative terms."""

    constant_s: float = Field(default=0.0, ge=0)
    """Per micro-batch."""
    slot_s: float = Field(default=0.0, ge=0)
    """Per token slot."""
    slot_length_s: float = Field(default=0.0, ge=0)
    """Per token slot and token of padded length: attention."""
    anchor_token_s: float = Field(default=0.0, ge=0)
    """Per anchor and block position."""

    def seconds(
        self,
        rows: NDArray[np.int64],
        padded_length: NDArray[np.int64],
        anchor_tokens: NDArray[np.int64],
    ) -> NDArray[np.float64]:
        """Return the predicted seconds of micro-batches, shape of the arguments."""
        slots = rows * padded_length
        return (
            self.constant_s
            + self.slot_s * slots
            + self.slot_length_s * (slots * padded_length.astype(np.float64))
            + self.anchor_token_s * anchor_tokens
        )


class Fingerprint(FrozenModel):
    """What a calibration was measured on; it says nothing about anything else."""

    hardware: str
    """Processor or GPU, with the count that was busy."""
    num_ranks: int
    """Processes that ran at the same time."""
    threads_per_rank: int
    """CPU threads of each."""
    target: str
    """Hash of the target's config and weights' sizes."""
    draft: str
    """Hash of the drafter's shape and loss."""
    precision: str
    """Precision of target and training."""
    attention: str
    """Attention implementation of the target."""
    versions: str
    """Versions of the libraries that do the work."""


class CostModel(FrozenModel):
    """A calibrated machine."""

    target: Coefficients
    """Forward of the frozen target."""
    draft: Coefficients
    """Forward and backward of the drafter."""
    step_s: float = Field(default=0.0, ge=0)
    """Per optimizer step: gradient reduction and update."""
    transfer_s_per_slot: float = Field(default=0.0, ge=0)
    """Sending the features of one token slot to another rank."""
    relative_error: float = Field(default=0.0, ge=0)
    """Median held-out error of the fit, both roles, as a share of the time."""
    inseparable: tuple[str, ...] = ()
    """Terms that the measured shapes could not tell apart, in words."""
    fingerprint: Fingerprint | None = None
    """Where it was measured."""

    def micro_batch_s(
        self,
        rows: NDArray[np.int64],
        padded_length: NDArray[np.int64],
        anchor_tokens: NDArray[np.int64],
    ) -> NDArray[np.float64]:
        """Return the seconds of target forward and drafter step together."""
        return self.target.seconds(rows, padded_length, anchor_tokens) + self.draft.seconds(
            rows, padded_length, anchor_tokens
        )
