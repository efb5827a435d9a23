"""The same steps on other ranks."""

from dataclasses import replace

import numpy as np

from dflash_core.planning.cost import PlanCost
from dflash_core.planning.epoch_plan import EpochPlan
from dflash_core.planning.ranks import assign_ranks
from dflash_core.planning.shuffling import random_stream

__all__ = ["relayout"]

RELAYOUT = 3


def relayout(plan: EpochPlan, *, world_size: int, cost: PlanCost | None = None) -> EpochPlan:
    """Lay a plan out for another number of consuming ranks, without planning it again.

    Steps hold what they held; rank loads are as evenly balanced as in a plan made for
    ``world_size``. Which of several like micro-batches goes where may differ from such a plan, so
    this is for predictions, not for training.

    Args:
        plan: The plan.
        world_size: Ranks that consume micro-batches.
        cost: Measure that balances them; the plan's own when not given.
    """
    num_steps = plan.num_steps
    members = plan.assignment.reshape(num_steps, -1)
    weights = plan.loss_weight.reshape(num_steps, -1)
    rng = random_stream(plan.identity.seed, plan.identity.epoch, RELAYOUT)
    idle = members < 0
    if plan.identity.config.mixing == "random":
        order = np.lexsort((rng.random(members.shape), idle), axis=1)
    else:  # neighbours in shape together, as the synchronised mixing deals them
        order = np.lexsort((plan.rows[members], plan.padded_lengths[members], idle), axis=1)
    used = int((~idle).sum(axis=1).max())
    order = order[:, :used]
    members = np.take_along_axis(members, order, axis=1)
    weights = np.take_along_axis(weights, order, axis=1)
    # A repeat gets a number of its own, so that it can be told from the original.
    identity = replace(plan.identity, world_size=world_size, cost=cost or plan.identity.cost)
    costs = plan.costs(identity.cost)
    repeats = np.flatnonzero((weights.ravel() == 0) & (members.ravel() >= 0))
    originals = members.ravel()[repeats]
    members.ravel()[repeats] = costs.size + np.arange(repeats.size)
    placed = assign_ranks(
        identity.config.mixing,
        members,
        np.concatenate([costs, costs[originals]]),
        world_size=world_size,
        rng=rng,
    )
    loss_weight = ((placed >= 0) & (placed < costs.size)).astype(np.float64)
    repeated = placed >= costs.size
    placed[repeated] = originals[placed[repeated] - costs.size]
    return replace(plan, assignment=placed, loss_weight=loss_weight, identity=identity)
