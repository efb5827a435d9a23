"""Which ranks do what, as far as time is concerned."""

from typing import Literal, Protocol

from pydantic import Field, model_validator

from dflash_core.config import FrozenModel

__all__ = ["Split", "Topology"]


class Topology(Protocol):
    """What a prediction needs to know of the ranks; `TopologyConfig` of a run is one."""

    @property
    def kind(self) -> Literal["colocated", "disaggregated"]:
        """Whether every rank runs both models."""
        ...

    @property
    def num_ranks(self) -> int:
        """Processes in all."""
        ...

    @property
    def num_consumers(self) -> int:
        """Processes that consume micro-batches."""
        ...

    @property
    def queue_depth(self) -> int:
        """Micro-batches that may wait between two stages."""
        ...

    @property
    def shard_target(self) -> bool:
        """Whether the target's layers are spread over the ranks that run it."""
        ...


class Split(FrozenModel):
    """A division of ranks between target and drafter; no target ranks means colocated."""

    num_ranks: int = Field(default=1, ge=1)
    """Processes in all."""
    num_target_ranks: int = Field(default=0, ge=0)
    """Processes that only run the target; 0 when every rank runs both models."""
    queue_depth: int = Field(default=2, ge=1)
    """Micro-batches that may wait between two stages."""
    shard_target: bool = False
    """Whether the target's layers are spread over the ranks that run it."""

    @model_validator(mode="after")
    def _leave_drafters(self) -> "Split":
        if self.num_target_ranks >= self.num_ranks:
            raise ValueError(
                f"{self.num_target_ranks} target ranks leave no drafter among {self.num_ranks} "
                "ranks; lower num_target_ranks"
            )
        return self

    @property
    def kind(self) -> Literal["colocated", "disaggregated"]:
        """Whether every rank runs both models."""
        return "disaggregated" if self.num_target_ranks else "colocated"

    @property
    def num_consumers(self) -> int:
        """Processes that consume micro-batches."""
        return self.num_ranks - self.num_target_ranks

    @property
    def label(self) -> str:
        """Name in tables, such as ``6+2`` or ``8 colocated``."""
        if self.kind == "colocated":
            return f"{self.num_ranks} colocated"
        return f"{self.num_target_ranks}+{self.num_consumers}"
