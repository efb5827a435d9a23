"""How many anchors a sample gets: one rule for the planner's budget and for training."""

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from dflash_core.config import FrozenModel

__all__ = ["AnchorConfig", "num_anchors"]


class AnchorConfig(FrozenModel):
    """Anchors in proportion to supervised tokens, so that no draft slot is spent on nothing."""

    anchors_per_supervised_token: float = Field(default=0.25, gt=0, le=1)
    """Share of a sample's supervised tokens that become anchors each epoch."""
    min_anchors: int = Field(default=4, ge=1, le=2**31)
    """Least anchors of a sample, as far as it has that many eligible positions."""
    max_anchors: int = Field(default=512, ge=1, le=2**31)
    """Most anchors of a sample (the paper's 512)."""

    @model_validator(mode="after")
    def _check_order(self) -> "AnchorConfig":
        if self.min_anchors > self.max_anchors:
            raise ValueError(
                f"min_anchors {self.min_anchors} is over max_anchors {self.max_anchors}; "
                "lower anchors.min_anchors or raise anchors.max_anchors"
            )
        return self


def num_anchors(supervised: NDArray[np.integer], config: AnchorConfig) -> NDArray[np.int64]:
    """Return how many anchors each sample gets.

    An anchor needs itself and its next token supervised, so a sample with one supervised run of
    ``s`` tokens has ``s - 1`` eligible positions; with several runs it has fewer and training
    draws fewer: the count here is an upper bound that the planner can budget with.

    Args:
        supervised: Supervised tokens of each sample, shape ``(num_samples,)``.
        config: The rule.

    Returns:
        Anchors of each sample, shape ``(num_samples,)``.

    Example:
        >>> num_anchors(np.array([0, 1, 3, 100, 9000]), AnchorConfig())
        array([  0,   0,   2,  25, 512])
    """
    supervised = np.asarray(supervised, dtype=np.int64)
    wanted = np.ceil(supervised * config.anchors_per_supervised_token).astype(np.int64)
    bounded = np.clip(wanted, config.min_anchors, config.max_anchors)
    return np.minimum(bounded, np.maximum(supervised - 1, 0))
