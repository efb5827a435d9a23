"""Which rank runs which micro-batch of a step, and in which accumulation slot."""

import numpy as np
from numpy.typing import NDArray

from dflash_core.compiled import compiled
from dflash_core.planning.config import Mixing

__all__ = ["assign_ranks"]

MAX_SWEEPS = 8


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
        placed = _balance(_heaviest_first(steps, costs), costs, accumulation, world_size)
    else:
        idle = np.full((num_steps, accumulation * world_size - per_step), -1, dtype=np.int64)
        placed = np.concatenate([steps, idle], axis=1)
        placed = placed.reshape(num_steps, accumulation, world_size)
    # No rank is always the one with the largest sum, or the idle one.
    turn = np.argsort(rng.random((num_steps, world_size)), axis=1, kind="stable")
    return np.take_along_axis(placed, turn[:, None, :], axis=2)


def _heaviest_first(steps: NDArray[np.int64], costs: NDArray[np.int64]) -> NDArray[np.int64]:
    # Idle places are dearer than nothing, so they end up last.
    price = np.where(steps >= 0, -costs[steps], 1)
    return np.take_along_axis(steps, np.argsort(price, axis=1, kind="stable"), axis=1)


@compiled
def _balance(steps, costs, accumulation, world_size):
    num_steps = steps.shape[0]
    placed = np.full((num_steps, accumulation, world_size), -1, dtype=np.int64)
    held = np.zeros(world_size, dtype=np.int64)
    loads = np.zeros(world_size, dtype=np.int64)
    for step in range(num_steps):
        size = 0
        while size < steps.shape[1] and steps[step, size] >= 0:
            size += 1
        room = (size + world_size - 1) // world_size
        for rank in range(world_size):
            held[rank] = 0
            loads[rank] = 0
        for place in range(size):
            member = steps[step, place]
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
    """Even out each pair of ranks by its best swap, in sweeps, until no swap helps."""
    for _ in range(MAX_SWEEPS):
        moved = False
        for rank in range(loads.size):
            for other in range(rank + 1, loads.size):
                excess = loads[rank] - loads[other]
                least, best_slot, best_place = abs(excess), -1, -1
                for slot in range(held[rank]):
                    for place in range(held[other]):
                        gain = costs[placed[slot, rank]] - costs[placed[place, other]]
                        if abs(excess - 2 * gain) < least:
                            least, best_slot, best_place = abs(excess - 2 * gain), slot, place
                if best_slot >= 0:
                    given = placed[best_slot, rank]
                    taken = placed[best_place, other]
                    placed[best_slot, rank], placed[best_place, other] = taken, given
                    loads[rank] += costs[taken] - costs[given]
                    loads[other] += costs[given] - costs[taken]
                    moved = True
        if not moved:
            return
