"""Settings of the bucket fit."""

from typing import Literal

from pydantic import Field

from dflash_core.config import FrozenModel

__all__ = ["BucketingConfig", "EdgeGrid", "EdgeObjective", "ShapeCost"]

EdgeObjective = Literal["slots", "cost", "batch_maximum"]
EdgeGrid = Literal["multiple", "harmonic"]


class ShapeCost(FrozenModel):
    """What micro-batches cost, in any one unit: seconds when calibrated."""

    per_micro_batch: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Constant of each micro-batch."""
    per_slot: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Cost of one token slot."""
    per_slot_length: float = Field(default=1 / 3_000, ge=0, allow_inf_nan=False)
    """Cost of one token slot for each token of its row."""


class BucketingConfig(FrozenModel):
    """Which edges are allowed, and what makes them good."""

    num_buckets: int = Field(default=24, ge=1, le=128)
    """Most edges."""
    objective: EdgeObjective = "slots"
    """Fewest slots, least predicted cost, or fewest slots when padded to the batch maximum."""
    multiple_of: int = Field(default=1, ge=1)
    """Edges are multiples of this many tokens."""
    grid: EdgeGrid = "multiple"
    """Any multiple, or only those that divide the token budget without a remainder to spare."""
    token_budget: int | None = Field(default=None, ge=1)
    """Most token slots of a micro-batch; needed by all but objective slots on grid multiple."""
    cost: ShapeCost = ShapeCost()
    """Coefficients of objective cost."""
    isolate_spike: bool = True
    """Give a truncation spike at the maximum an edge of its own."""
    max_candidates: int = Field(default=1_024, ge=2, le=1_024)
    """Most edges that the objectives cost and batch_maximum choose among."""
