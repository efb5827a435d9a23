"""What a plan is made of, hashed: may a run go on with it?"""

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dflash_core.artifacts import content_digest
from dflash_core.planning.config import BatchingConfig
from dflash_core.planning.cost import PlanCost

__all__ = ["PLANNER_VERSION", "PlanIdentity", "changed_ingredients"]

PLANNER_VERSION = 1
"""Raised whenever the same inputs give another plan."""


@dataclass(frozen=True)
class PlanIdentity:
    """Everything that decides what is trained on in which step, and who runs it."""

    lengths: NDArray[np.int32]
    kept: NDArray[np.int64] | None
    supervised: NDArray[np.int64] | None
    config: BatchingConfig
    seed: int
    epoch: int
    world_size: int
    cost: PlanCost

    @cached_property
    def ingredients(self) -> dict[str, str]:
        """Name and digest or value of each ingredient of the content hash."""
        kept = b"" if self.kept is None else _bytes(self.kept)
        supervised = "none" if self.supervised is None else content_digest(_bytes(self.supervised))
        return {
            "lengths": content_digest(_bytes(self.lengths), kept),
            "supervised": supervised,
            **{f"batching.{k}": str(v) for k, v in self.config.model_dump(mode="json").items()},
            "seed": str(self.seed),
            "epoch": str(self.epoch),
            "planner_version": str(PLANNER_VERSION),
        }

    @cached_property
    def content_hash(self) -> str:
        """Digest of all ingredients: a resume needs the same one."""
        return content_digest(self.ingredients)

    @cached_property
    def layout_hash(self) -> str:
        """Digest of world size and cost: may change on resume."""
        return content_digest(self.world_size, self.cost.model_dump())


def changed_ingredients(stored: dict[str, str], current: dict[str, str]) -> list[str]:
    """Return one phrase per ingredient that differs, for the refusal of a resume.

    Example:
        >>> changed_ingredients({"seed": "0", "epoch": "1"}, {"seed": "7", "epoch": "1"})
        ['seed was 0 and is 7']
    """
    names = [*stored, *(name for name in current if name not in stored)]
    return [
        f"{name} was {_short(stored.get(name))} and is {_short(current.get(name))}"
        for name in names
        if stored.get(name) != current.get(name)
    ]


def _bytes(values: NDArray[np.integer]) -> bytes:
    return np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<")).tobytes()


def _short(value: str | None) -> str:
    if value is None:
        return "absent"
    return value[:12] if re.fullmatch("[0-9a-f]{64}", value) else value
