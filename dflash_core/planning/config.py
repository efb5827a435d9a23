"""Settings of the batch planner."""

from itertools import pairwise
from typing import Literal

from pydantic import Field, field_validator

from dflash_core.bucketing.config import EdgeGrid, EdgeObjective, ShapeCost
from dflash_core.config import FrozenModel
from dflash_core.planning.anchors import AnchorConfig

__all__ = ["BatchingConfig", "Mixing", "Oversize", "Tail"]

Mixing = Literal["synchronised", "diverse", "random"]
Oversize = Literal["error", "truncate", "drop"]
Tail = Literal["partial", "repeat", "drop"]


class BatchingConfig(FrozenModel):
    """How samples become micro-batches, and micro-batches become steps."""

    strategy: str = "bucketed"
    """Name of a registered strategy: sorted, random, bucketed, pooled or packed."""
    token_budget: int = Field(default=49_152, ge=1, le=2**40)
    """Most token slots, padding included, in one micro-batch on one rank."""
    anchor_budget: int | None = Field(default=None, ge=1, le=2**40)
    """Most anchors in one micro-batch; unlimited when not given."""
    max_samples: int | None = Field(default=None, ge=1, le=2**40)
    """Most samples in one micro-batch; unlimited when not given."""
    micro_batches_per_step: int = Field(default=8, ge=1, le=2**20)
    """Micro-batches of one optimizer step over all ranks."""
    mixing: Mixing = "diverse"
    """How micro-batches are spread over steps and ranks."""
    tail: Tail = "partial"
    """A short last step stays short, is filled with weight-0 repeats, or is dropped."""
    max_length: int | None = Field(default=None, ge=1, lt=2**31 - 1)
    """Longest sample in tokens; token_budget when not given."""
    oversize: Oversize = "error"
    """What happens to samples that are longer than max_length or have no usable length."""
    num_buckets: int = Field(default=24, ge=1, le=128)
    """Most buckets that the bucketed strategy fits when no edges are given; a small set has fewer,
    so that each fills several micro-batches an epoch."""
    edge_objective: EdgeObjective = "slots"
    """What fitted edges minimise."""
    edge_grid: EdgeGrid = "multiple"
    """Edges on any multiple, or only where whole rows use the budget up."""
    edge_cost: ShapeCost = ShapeCost()
    """Coefficients of edge objective cost."""
    edges: tuple[int, ...] | None = None
    """Given bucket edges: increasing inclusive upper bounds in tokens."""
    pad_to: Literal["batch", "edge"] = "batch"
    """Pad a bucketed micro-batch to its longest sample, or to its bucket's edge."""
    multiple_of: int = Field(default=1, ge=1)
    """Padded lengths and fitted edges are rounded up to this many tokens."""
    pool_size: int = Field(default=5_600, ge=1)
    """Samples that the pooled strategy sorts together."""
    anchors: AnchorConfig = AnchorConfig()
    """The anchor rule, used with anchor_budget and by training."""

    @field_validator("edges")
    @classmethod
    def _check_edges(cls, edges: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if edges is None:
            return None
        if not 1 <= len(edges) <= 128:
            raise ValueError(f"{len(edges)} edges are given; give 1 to 128")
        if edges[0] < 1 or any(a >= b for a, b in pairwise(edges)):
            raise ValueError(f"edges {list(edges)} must be positive and increasing")
        if edges[-1] >= 2**31 - 1:
            raise ValueError(f"edge {edges[-1]:,} is over the most tokens of a sample, 2**31 - 2")
        return edges
