"""An epoch as events: prefetch -> target -> transfer -> drafter, with bounded queues.

Routes and order follow from the plan, so no event queue is needed: taken in the order of the run,
everything a micro-batch waits for lies before it. Each rule below is one `max`:

- A stage begins a micro-batch when its input is there and it has handed over the one before.
- It hands over when the queue behind it has room, that is when the one ``depth`` before was taken.
- A drafter rank grants as many micro-batches as it has room for; a target rank sends when granted.
- A step ends for all drafter ranks when the slowest has done its last micro-batch, plus `step_s`.

Noise between ranks makes the slowest slower than any expectation: the expected maximum over ranks
is taken with the spread that calibration measured (Clark's formula, rank by rank).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_core.compiled import compiled

__all__ = ["Durations", "Timeline", "route_targets", "simulate"]


@dataclass(frozen=True)
class Durations:
    """Seconds of each stage for each micro-batch, shape ``(num_micro_batches,)`` each.

    Attributes:
        prefetch: Reading and laying out; 0 where it is counted with the computing stage.
        target: Forward of the target.
        transfer: Sending features to another rank.
        draft: Forward and backward of the drafter.
        step_s: Per optimizer step.
        jitter: Spread between ranks, as a share of a micro-batch's time.
    """

    prefetch: NDArray[np.float64]
    target: NDArray[np.float64]
    transfer: NDArray[np.float64]
    draft: NDArray[np.float64]
    step_s: float = 0.0
    jitter: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """What came of it.

    Attributes:
        step_ends: Time at which each step ends, shape ``(num_steps,)``.
        busy_s: Seconds that prefetch, target, transfer and drafter worked, all ranks together.
        input_waited_s: Seconds that consuming ranks waited for reading or features.
        step_waited_s: Seconds that consuming ranks waited for the slowest of a step.
        mean_queues: Mean number of micro-batches that wait, read but not begun, for a rank that
            begins with them; and with features, for a drafter rank (0 where both are one rank).
    """

    step_ends: NDArray[np.float64]
    busy_s: tuple[float, float, float, float]
    input_waited_s: float
    step_waited_s: float
    mean_queues: tuple[float, float]

    @property
    def epoch_s(self) -> float:
        """Seconds of the epoch."""
        return float(self.step_ends[-1]) if self.step_ends.size else 0.0


def simulate(
    assignment: NDArray[np.int64],
    durations: Durations,
    *,
    routes: NDArray[np.int64] | None = None,
    depth: int = 2,
) -> Timeline:
    """Run an epoch in simulated time.

    Args:
        assignment: Micro-batch of each step, slot and consuming rank, -1 where idle.
        durations: Seconds of the stages.
        routes: Target rank of each place, same shape; None when every rank runs both models.
        depth: Micro-batches that may wait between two stages.
    """
    stages = (durations.prefetch, durations.target, durations.transfer, durations.draft)
    placed = np.ascontiguousarray(assignment)
    limits = (durations.step_s, durations.jitter)
    if routes is None:
        step_ends, waits = _colocated(placed, *stages, *limits, depth)
    else:
        step_ends, waits = _disaggregated(
            placed, np.ascontiguousarray(routes), int(routes.max()) + 1, *stages, *limits, depth
        )
    used = placed[placed >= 0]
    busy_s = [float(stage[used].sum()) for stage in stages]
    if routes is None:
        busy_s[2] = 0.0
    epoch_s = float(step_ends[-1])
    consumers = placed.shape[2]
    readers = consumers if routes is None else int(routes.max()) + 1
    return Timeline(
        step_ends=step_ends,
        busy_s=(busy_s[0], busy_s[1], busy_s[2], busy_s[3]),
        input_waited_s=float(waits[0]),
        step_waited_s=float(waits[1]),
        mean_queues=(
            float(waits[2]) / (epoch_s * readers) if epoch_s else 0.0,
            float(waits[3]) / (epoch_s * consumers) if epoch_s else 0.0,
        ),
    )


@compiled
def route_targets(assignment, costs, num_targets, in_rounds=False):
    """Return the target rank of each place: the one with the least cost so far, as training does.

    Args:
        assignment: Micro-batch of each step, slot and consuming rank, -1 where idle.
        costs: Cost of each micro-batch.
        num_targets: Target ranks.
        in_rounds: Whether each `num_targets` micro-batches of a step in turn go to as many ranks,
            the costliest to the one with the least cost so far.
    """
    num_steps, num_slots, num_ranks = assignment.shape
    routes = np.full(assignment.shape, -1, dtype=np.int64)
    loads = np.zeros(num_targets, dtype=np.int64)
    size = num_targets if in_rounds else 1
    places = np.zeros((num_slots * num_ranks, 2), dtype=np.int64)
    for step in range(num_steps):
        count = 0
        for slot in range(num_slots):
            for rank in range(num_ranks):
                if assignment[step, slot, rank] >= 0:
                    places[count, 0] = slot
                    places[count, 1] = rank
                    count += 1
        for start in range(0, count, size):
            turn = np.empty(min(size, count - start), dtype=np.int64)
            for place in range(turn.size):
                slot, rank = places[start + place]
                turn[place] = costs[assignment[step, slot, rank]]
            dearest, idlest = np.argsort(-turn, kind="mergesort"), np.zeros(1, dtype=np.int64)
            if size == 1:
                idlest[0] = np.argmin(loads)
            else:
                idlest = np.argsort(loads, kind="mergesort")
            for place in range(turn.size):
                slot, rank = places[start + dearest[place]]
                routes[step, slot, rank] = idlest[place]
                loads[idlest[place]] += turn[dearest[place]]
    return routes


@compiled
def _colocated(assignment, prefetch, target, transfer, draft, step_s, jitter, depth):
    num_steps, num_slots, num_ranks = assignment.shape
    step_ends, waits = np.zeros(num_steps), np.zeros(4)
    count = np.zeros(num_ranks, dtype=np.int64)
    read, taken = np.zeros(num_ranks), np.zeros((num_ranks, depth))
    free, variance = np.zeros(num_ranks), np.zeros(num_ranks)
    begin = 0.0
    for step in range(num_steps):
        free[:] = begin
        variance[:] = 0.0
        for slot in range(num_slots):
            for rank in range(num_ranks):
                index = assignment[step, slot, rank]
                if index < 0:
                    continue
                place = count[rank] % depth
                count[rank] += 1
                read[rank] = max(read[rank] + prefetch[index], taken[rank, place])
                start = max(free[rank], read[rank])
                taken[rank, place] = start
                work = target[index] + draft[index]
                waits[0] += start - free[rank]
                waits[2] += start - read[rank]
                free[rank] = start + work
                variance[rank] += (jitter * work) ** 2
        latest = _expected_maximum(free, variance)
        waits[1] += latest * num_ranks - free.sum()
        begin = latest + step_s
        step_ends[step] = begin
    return step_ends, waits


@compiled
def _disaggregated(
    assignment, routes, num_targets, prefetch, target, transfer, draft, step_s, jitter, depth
):
    num_steps, num_slots, num_ranks = assignment.shape
    step_ends, waits = np.zeros(num_steps), np.zeros(4)
    # Target ranks: number, last hand-over of reading and of features, times of taking, last send.
    made = np.zeros(num_targets, dtype=np.int64)
    read, taken = np.zeros(num_targets), np.zeros((num_targets, depth))
    ready, fetched = np.zeros(num_targets), np.zeros((num_targets, depth))
    sent = np.zeros(num_targets)
    # Drafter ranks: number, hand-over of arrivals (which grants the one `depth` later), last start.
    count = np.zeros(num_ranks, dtype=np.int64)
    arrived, granted = np.zeros(num_ranks), np.zeros((num_ranks, depth))
    started = np.zeros(num_ranks)
    free, variance = np.zeros(num_ranks), np.zeros(num_ranks)
    begin = 0.0
    for step in range(num_steps):
        free[:] = begin
        variance[:] = 0.0
        for slot in range(num_slots):
            for rank in range(num_ranks):
                index = assignment[step, slot, rank]
                if index < 0:
                    continue
                source = routes[step, slot, rank]
                place, room = made[source] % depth, count[rank] % depth
                made[source] += 1
                count[rank] += 1
                read[source] = max(read[source] + prefetch[index], taken[source, place])
                begun = max(ready[source], read[source])
                taken[source, place] = begun
                ready[source] = max(begun + target[index], fetched[source, place])
                fetched[source, place] = max(ready[source], sent[source])
                sending = max(max(fetched[source, place], granted[rank, room]), arrived[rank])
                sent[source] = sending + transfer[index]
                # One micro-batch waits on the drafter's side; the next stays with its receiver.
                arrived[rank] = max(sent[source], started[rank])
                granted[rank, room] = arrived[rank]
                start = max(free[rank], sent[source])
                started[rank] = start
                waits[0] += start - free[rank]
                waits[2] += begun - read[source]
                waits[3] += start - ready[source] - transfer[index]
                free[rank] = start + draft[index]
                variance[rank] += (jitter * draft[index]) ** 2
        latest = _expected_maximum(free, variance)
        waits[1] += latest * num_ranks - free.sum()
        begin = latest + step_s
        step_ends[step] = begin
    return step_ends, waits


@compiled
def _expected_maximum(means, variances):
    mean, variance = means[0], variances[0]
    for rank in range(1, means.size):
        other = means[rank]
        spread = np.sqrt(variance + variances[rank])
        if spread <= 1e-9 * abs(mean - other) or spread == 0:
            if other > mean:
                mean, variance = other, variances[rank]
            continue
        alpha = (mean - other) / spread
        density = np.exp(-0.5 * alpha * alpha) / np.sqrt(2 * np.pi)
        above = 0.5 * (1 + math.erf(alpha / np.sqrt(2)))
        # Moments about `other`, so that no digits are lost late in the epoch.
        gap = mean - other
        first = gap * above + spread * density
        second = (gap * gap + variance) * above + variances[rank] * (1 - above)
        second += gap * spread * density
        mean = other + first
        variance = max(second - first * first, 0.0)
    return mean
