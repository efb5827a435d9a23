"""Which rank runs which micro-batch of a step, and in which accumulation slot."""

import numpy as np
from numpy.typing import NDArray

from dflash_core.compiled import compiled
from dflash_core.planning.config import Mixing

__all__ = ["assign_ranks"]


def assign_ranks(
    mixing: Mixing,
    steps: NDArray[np.int64],
    costs: NDArray[np.int64],
    *,
    world_size: int,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Place the micro-batches of each step.

    ``diverse`` balances the rank sums of cost: longest first to the least loaded rank, then
    exchanges. ``synchronised`` gives one slot's ranks neighbours in shape. ``random`` deals.

    Args:
        mixing: The manner.
        steps: Micro-batch of each place of each step, -1 where a step is short; int64, shape
            ``(num_steps, micro_batches_per_step)``.
        costs: Cost of each micro-batch, int64, shape ``(num_micro_batches,)``.
        world_size: Ranks that consume micro-batches.
        rng: Random stream of this epoch's layout.

    Returns:
        Micro-batch of each rank and slot, -1 = idle; int64, shape
        ``(num_steps, accumulation, world_size)``.
    """
    num_steps, per_step = steps.shape
    accumulation = -(-per_step // world_size)
    if mixing == "diverse":
        placed = _balance(steps, costs, accumulation, world_size)
    else:
        idle = np.full((num_steps, accumulation * world_size - per_step), -1, dtype=np.int64)
        placed = np.concatenate([steps, idle], axis=1)
        placed = placed.reshape(num_steps, accumulation, world_size)
    # No rank is always the one with the largest sum, or the idle one.
    turn = np.argsort(rng.random((num_steps, world_size)), axis=1, kind="stable")
    return np.take_along_axis(placed, turn[:, None, :], axis=2)


@compiled
def _balance(steps, costs, accumulation, world_size):
    num_steps = steps.shape[0]
    placed = np.full((num_steps, accumulation, world_size), -1, dtype=np.int64)
    held = np.zeros(world_size, dtype=np.int64)
    loads = np.zeros(world_size, dtype=np.int64)
    for step in range(num_steps):
        members = steps[step][steps[step] >= 0]
        members = members[np.argsort(-costs[members], kind="mergesort")]
        room = (members.size + world_size - 1) // world_size
        held[:] = 0
        loads[:] = 0
        for member in members:
            rank = -1
            for other in range(world_size):
                if held[other] < room and (rank < 0 or loads[other] < loads[rank]):
                    rank = other
            placed[step, held[rank], rank] = member
            held[rank] += 1
            loads[rank] += costs[member]
        _exchange(placed[step], costs, held, loads)
    return placed


@compiled
def _exchange(placed, costs, held, loads):
    """Swap pairs between the most loaded rank and others while that lowers the larger sum."""
    for _ in range(8 * loads.size):
        top = np.argmax(loads)
        best = loads[top]
        best_slot, best_other, best_rank = -1, -1, -1
        for rank in range(loads.size):
            if rank == top:
                continue
            for slot in range(held[top]):
                for other in range(held[rank]):
                    gain = costs[placed[slot, top]] - costs[placed[other, rank]]
                    larger = max(loads[top] - gain, loads[rank] + gain)
                    if larger < best:
                        best, best_slot, best_other, best_rank = larger, slot, other, rank
        if best_slot < 0:
            return
        moved = placed[best_slot, top]
        gain = costs[moved] - costs[placed[best_other, best_rank]]
        placed[best_slot, top] = placed[best_other, best_rank]
        placed[best_other, best_rank] = moved
        loads[top] -= gain
        loads[best_rank] += gain
