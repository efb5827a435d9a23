"""Predict a plan's throughput from the cost model, micro-batch by micro-batch."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dflash_core.config import FrozenModel
from dflash_core.planning import EpochPlan
from dflash_core.throughput.cost import CostModel

__all__ = ["Prediction", "predict", "rank_seconds"]

# What the fit does not see: the clock of a shared machine drifts between measuring and running.
DRIFT = 0.05


class Prediction(FrozenModel):
    """What an epoch of a plan is expected to cost."""

    ktok_s: float
    """Real tokens per second of all ranks, in thousands."""
    low: float
    """Lower end of the interval of ktok_s."""
    high: float
    """Upper end of the interval of ktok_s."""
    step_s: float
    """Mean seconds of an optimizer step."""
    epoch_s: float
    """Seconds of the epoch."""
    bottleneck: Literal["target", "draft", "straggler"]
    """What the most time goes to."""
    waiting_share: float
    """Share of rank time spent waiting for the slowest rank of a step."""


def predict(plan: EpochPlan, cost: CostModel, *, block_size: int) -> Prediction:
    """Predict one epoch in which every rank runs target and drafter on its micro-batches.

    A step lasts as long as its slowest rank, plus the optimizer's constant.

    Args:
        plan: The epoch's plan.
        cost: The calibrated machine.
        block_size: Block size of the drafter.
    """
    rows, lengths = plan.rows, plan.padded_lengths
    anchor_tokens = plan.num_anchors * block_size
    target = cost.target.seconds(rows, lengths, anchor_tokens)
    draft = cost.draft.seconds(rows, lengths, anchor_tokens)
    busy = rank_seconds(plan.assignment, target + draft)
    slowest = busy.max(axis=1)
    epoch_s = float(slowest.sum() + cost.step_s * plan.num_steps)
    waiting = float((slowest[:, None] - busy).sum() / max(busy.shape[1] * epoch_s, 1e-12))
    shares = {
        "target": float(target.sum()) / busy.shape[1],
        "draft": float(draft.sum()) / busy.shape[1] + cost.step_s * plan.num_steps,
        "straggler": waiting * epoch_s,
    }
    ktok_s = plan.total_tokens / epoch_s / 1000
    spread = float(np.hypot(cost.relative_error, DRIFT))
    bottleneck: Literal["target", "draft", "straggler"] = max(shares, key=shares.__getitem__)  # type: ignore[assignment]
    return Prediction(
        ktok_s=ktok_s,
        low=ktok_s / (1 + spread),
        high=ktok_s * (1 + spread),
        step_s=epoch_s / max(plan.num_steps, 1),
        epoch_s=epoch_s,
        bottleneck=bottleneck,
        waiting_share=waiting,
    )


def rank_seconds(
    assignment: NDArray[np.int64], seconds: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the busy seconds of each rank in each step, shape ``(num_steps, world_size)``.

    Args:
        assignment: Micro-batch per step, slot and rank, -1 where idle.
        seconds: Seconds of each micro-batch.
    """
    padded = np.append(seconds, 0.0)  # index -1 reads the 0
    return padded[assignment].sum(axis=1)
