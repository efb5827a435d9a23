"""The recurrences against an event loop with real queues, written the obvious way."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.throughput import Durations, route_targets, simulate


def durations(rng, count, *, step_s=0.0, jitter=0.0):
    prefetch, target, transfer, draft = rng.uniform(0.1, 2.0, (4, count))
    return Durations(prefetch, target, transfer, draft, step_s, jitter)


def deal(num_micro_batches, slots, ranks):
    """Deal micro-batches out to steps; what is missing at the end is idle."""
    per_step = slots * ranks
    steps = -(-num_micro_batches // per_step)
    placed = np.full(steps * per_step, -1, dtype=np.int64)
    placed[:num_micro_batches] = np.arange(num_micro_batches)
    return placed.reshape(steps, slots, ranks)


def polled(assignment, d, routes, depth):
    """Walk through time from event to event; every queue is a deque that knows when."""
    steps, slots, ranks = assignment.shape
    order = [
        (step, rank, int(assignment[step, slot, rank]), int(routes[step, slot, rank]))
        for step in range(steps)
        for slot in range(slots)
        for rank in range(ranks)
        if assignment[step, slot, rank] >= 0
    ]
    sources = sorted({source for *_, source in order})
    reading = {s: deque(item for item in order if item[3] == s) for s in sources}
    taking = {r: deque(item for item in order if item[1] == r) for r in range(ranks)}
    read_q = {s: deque() for s in sources}
    ready_q = {s: deque() for s in sources}
    window = {r: deque(list(taking[r])[:depth]) for r in range(ranks)}
    beyond = {r: deque(list(taking[r])[depth:]) for r in range(ranks)}
    inbox: dict[int, deque] = {r: deque() for r in range(ranks)}
    held: dict[int, object] = dict.fromkeys(range(ranks))
    working: dict[str, list] = {}
    ends: dict[int, float] = {}
    done = dict.fromkeys(range(steps), 0)
    expected = {step: sum(item[0] == step for item in order) for step in range(steps)}
    now, step = 0.0, 0
    wait_until = 0.0

    def begin(name, item, seconds):
        working[name] = [now + seconds, item, False]

    while len(ends) < steps:
        moved = True
        while moved:
            moved = False
            for s in sources:
                job = working.get(f"read{s}")
                if job and job[0] <= now and len(read_q[s]) < depth:
                    read_q[s].append(job[1])
                    del working[f"read{s}"]
                    moved = True
                if f"read{s}" not in working and reading[s]:
                    item = reading[s].popleft()
                    begin(f"read{s}", item, d.prefetch[item[2]])
                    moved = True
                job = working.get(f"target{s}")
                if job and job[0] <= now and len(ready_q[s]) < depth:
                    ready_q[s].append(job[1])
                    del working[f"target{s}"]
                    moved = True
                if f"target{s}" not in working and read_q[s]:
                    item = read_q[s].popleft()
                    begin(f"target{s}", item, d.target[item[2]])
                    moved = True
                job = working.get(f"send{s}")
                if job and not job[2]:  # taken out of the queue, waits for its grant
                    item = job[1]
                    free = held[item[1]] is None and not any(
                        f"recv{item[1]}" == name for name in working
                    )
                    if window[item[1]] and window[item[1]][0] == item and free:
                        working[f"send{s}"] = [now + d.transfer[item[2]], item, True]
                        working[f"recv{item[1]}"] = [np.inf, item, True]
                        moved = True
                elif job and job[0] <= now:
                    item = job[1]
                    del working[f"send{s}"], working[f"recv{item[1]}"]
                    window[item[1]].popleft()
                    held[item[1]] = item
                    moved = True
                if f"send{s}" not in working and ready_q[s]:
                    working[f"send{s}"] = [now, ready_q[s].popleft(), False]
                    moved = True
            for r in range(ranks):
                if held[r] is not None and not inbox[r]:
                    inbox[r].append(held[r])
                    held[r] = None
                    if beyond[r]:
                        window[r].append(beyond[r].popleft())
                    moved = True
                job = working.get(f"draft{r}")
                if job and job[0] <= now:
                    done[job[1][0]] += 1
                    del working[f"draft{r}"]
                    moved = True
                idle = f"draft{r}" not in working and now >= wait_until
                if idle and inbox[r] and inbox[r][0][0] == step:
                    item = inbox[r].popleft()
                    begin(f"draft{r}", item, d.draft[item[2]])
                    moved = True
            if step < steps and done[step] == expected[step] and step not in ends:
                ends[step] = wait_until = now + d.step_s
                step += 1
                moved = True
        later = [job[0] for job in working.values() if now < job[0] < np.inf]
        later += [wait_until] if wait_until > now else []
        if not later:
            break
        now = min(later)
    return np.array([ends[step] for step in range(steps)])


@settings(max_examples=60)
@given(
    st.integers(1, 25),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(0, 2**31),
)
def test_disaggregated_times_are_those_of_a_polled_pipeline(
    count, slots, ranks, targets, depth, seed
):
    rng = np.random.default_rng(seed)
    d = durations(rng, count, step_s=float(rng.uniform(0, 1)))
    assignment = deal(count, slots, ranks)
    routes = route_targets(assignment, np.full(count, 3), targets)
    found = simulate(assignment, d, routes=routes, depth=depth).step_ends
    np.testing.assert_allclose(found, polled(assignment, d, routes, depth), rtol=1e-9)


def test_colocated_ranks_take_target_and_drafter_in_turn():
    d = durations(np.random.default_rng(0), 12, step_s=0.5)
    d.prefetch[:] = 0.0
    assignment = deal(12, 2, 3)
    work = d.target + d.draft
    expected = np.cumsum([work[assignment[step]].sum(axis=0).max() + 0.5 for step in range(2)])
    np.testing.assert_allclose(simulate(assignment, d).step_ends, expected)


def test_slow_reading_binds_and_is_counted_as_waiting_for_input():
    count = 20
    ones = np.ones(count)
    d = Durations(prefetch=5 * ones, target=ones, transfer=ones, draft=ones)
    timeline = simulate(deal(count, 1, 1), d)
    assert timeline.epoch_s == pytest.approx(5 * count + 2)
    assert timeline.input_waited_s == pytest.approx(timeline.epoch_s - 2 * count)


def test_overlap_hides_the_faster_of_target_and_drafter():
    count = 400
    ones = np.ones(count)
    d = Durations(prefetch=0 * ones, target=ones, transfer=0 * ones, draft=0.9 * ones)
    assignment = deal(count, 4, 1)
    routes = route_targets(assignment, np.ones(count, dtype=np.int64), 1)
    assert simulate(assignment, d, routes=routes).epoch_s == pytest.approx(count + 0.9)
    assert simulate(assignment, d).epoch_s == pytest.approx(1.9 * count)


def test_noise_between_ranks_makes_steps_as_long_as_sampling_says():
    ranks, count = 4, 4
    ones = np.ones(count)
    quiet = Durations(0 * ones, ones, 0 * ones, ones)
    noisy = Durations(0 * ones, ones, 0 * ones, ones, jitter=0.1)
    assignment = deal(count, 1, ranks)
    longer = simulate(assignment, noisy).epoch_s - simulate(assignment, quiet).epoch_s
    drawn = np.random.default_rng(0).normal(0, 0.2, (100_000, ranks)).max(axis=1).mean()
    # Clark's formula treats the maximum so far as normal: a percent off for four ranks.
    assert longer == pytest.approx(drawn, rel=0.02)


def test_ready_micro_batches_are_counted_by_littles_law():
    ones = np.ones(100)
    fast = Durations(0 * ones, 0.1 * ones, 0 * ones, ones)
    assignment = deal(100, 1, 1)
    routes = np.zeros_like(assignment)
    timeline = simulate(assignment, fast, routes=routes, depth=2)
    read, with_features = timeline.mean_queues
    assert 1.5 < read <= 2.0  # the target waits for room, so what is read waits too
    assert 4.0 < with_features <= 5.0  # two in the queue, one sent, one received, one at hand
    assert timeline.busy_s == pytest.approx((0.0, 10.0, 0.0, 100.0))


def test_targets_are_loaded_evenly():
    costs = np.random.default_rng(0).integers(1, 100, 60)
    assignment = deal(60, 2, 3)
    routes = route_targets(assignment, costs, 2)
    loads = [costs[assignment[routes == target]].sum() for target in range(2)]
    assert abs(loads[0] - loads[1]) <= costs.max()
