"""Fast paths against slow, obvious ones."""

from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.planning import BatchingConfig, plan_epoch
from dflash_core.planning.batches import Samples, close_batches
from dflash_core.planning.diversity import (
    length_eta2,
    pair_recurrence,
    step_length_eta2,
    straggler_factor,
)
from dflash_core.planning.ranks import assign_ranks
from dflash_core.planning.shuffling import random_stream, shuffle_segments, shuffled, sort_pools

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=80)
QUICK = settings(max_examples=60)


def groups_of(plan):
    return [plan.micro_batch(i).tolist() for i in range(plan.num_micro_batches)]


def plan_of(lengths, strategy, epoch=0, **changes):
    config = BatchingConfig(strategy=strategy, token_budget=120, **changes)
    return plan_epoch(lengths, config, epoch=epoch, seed=3, world_size=2)


def plain_greedy(order, lengths, budget, max_samples, anchors, anchor_budget, multiple):
    """Close a micro-batch as soon as one more sample would break a limit."""
    batches, current = [], []
    for sample in order:
        tried = [*current, sample]
        width = -(-max(lengths[member] for member in tried) // multiple) * multiple
        fits = len(tried) * width <= budget and len(tried) <= max_samples
        if current and not (fits and sum(anchors[member] for member in tried) <= anchor_budget):
            batches.append(current)
            current = [sample]
        else:
            current = tried
    return [*batches, current]


@QUICK
@given(LENGTHS, st.randoms(), st.integers(1, 9), st.integers(4, 30), st.sampled_from([1, 8]))
def test_micro_batches_close_like_the_plain_greedy(lengths, random, most, anchor_budget, multiple):
    order = list(range(len(lengths)))
    random.shuffle(order)
    anchors = [random.randint(0, 4) for _ in lengths]
    config = BatchingConfig(
        token_budget=120, max_samples=most, anchor_budget=anchor_budget, multiple_of=multiple
    )
    samples = Samples(np.array(lengths, np.int32), np.array(anchors, np.int32))
    fast = close_batches(np.array(order, np.int32), samples, config)
    slow = plain_greedy(order, lengths, 120, most, anchors, anchor_budget, multiple)
    assert [part.tolist() for part in np.split(fast.order, fast.offsets[1:-1])] == slow
    assert fast.padded_lengths.tolist() == [
        -(-max(lengths[member] for member in batch) // multiple) * multiple for batch in slow
    ]


@QUICK
@given(LENGTHS)
def test_sorted_is_a_stable_sort_filled_greedily(lengths):
    order = sorted(range(len(lengths)), key=lambda sample: lengths[sample])
    slow = plain_greedy(order, lengths, 120, 10**9, [0] * len(lengths), 0, 1)
    assert groups_of(plan_of(lengths, "sorted")) == slow


@QUICK
@given(st.lists(st.integers(1, 2**31 - 2), min_size=1, max_size=60), st.integers(1, 70))
def test_pools_are_sorted_stably_up_and_down_by_turns(lengths, pool_size):
    order = np.random.default_rng(0).permutation(len(lengths)).astype(np.int32)
    ordered = np.array(lengths, np.int32)[order]
    slow = []
    for number, start in enumerate(range(0, len(order), pool_size)):
        pool = sorted(order[start : start + pool_size], key=lambda sample: lengths[sample])
        slow += pool[::-1] if number % 2 else pool
    sort_pools(order, ordered, pool_size)
    assert order.tolist() == slow
    assert ordered.tolist() == [lengths[sample] for sample in slow]


def test_every_permutation_is_equally_likely():
    rng = random_stream(0, 0, 0)
    counts = dict.fromkeys(permutations(range(4)), 0)
    for _ in range(4_800):
        counts[tuple(shuffled(4, rng).tolist())] += 1
    # Chi-square with 23 degrees of freedom: above 49.7 once in 1,000 seeds; this one is fixed.
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 49.7


def test_segments_beyond_the_cache_are_shuffled_too(monkeypatch):
    from dflash_core.planning import shuffling

    monkeypatch.setattr(shuffling, "BLOCK", 8)
    monkeypatch.setattr(shuffling, "CHUNK", 5)
    rng = random_stream(1, 0, 0)
    order = np.arange(60, dtype=np.int32)
    shuffle_segments(order, np.array([0, 7, 60]), rng)
    assert sorted(order[:7]) == list(range(7))
    assert sorted(order[7:]) == list(range(7, 60))
    counts = np.zeros((3, 9))
    for _ in range(3_000):
        drawn = shuffled(9, rng)
        counts[np.arange(3), drawn[:3]] += 1
    # Chi-square with 8 degrees of freedom for each place: 26.1 once in 1,000 seeds.
    assert (((counts - 3_000 / 9) ** 2 / (3_000 / 9)).sum(axis=1) < 26.1).all()


@QUICK
@given(LENGTHS, st.integers(1, 40))
def test_no_later_sample_would_have_fitted_into_a_packed_row(lengths, seed):
    config = BatchingConfig(strategy="packed", token_budget=120)
    plan = plan_epoch(lengths, config, epoch=0, seed=seed, world_size=1)
    groups = groups_of(plan)
    for number, group in enumerate(groups):
        gap = 120 - sum(lengths[member] for member in group)
        assert all(lengths[member] > gap >= 0 for later in groups[number + 1 :] for member in later)
    assert plan.padding_efficiency == 1
    assert plan.rows.tolist() == [1] * plan.num_micro_batches
    assert plan.slot_lengths.tolist() == [
        sum(lengths[member] ** 2 for member in group) for group in groups
    ]


def best_fit_decreasing(lengths, capacity):
    gaps = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row, gap in enumerate(gaps) if gap >= length]
        if fitting:
            gaps[min(fitting, key=lambda row: gaps[row])] -= length
        else:
            gaps.append(capacity - length)
    return len(gaps)


def test_packed_needs_no_more_rows_than_best_fit_decreasing_and_mixes_lengths():
    lengths = np.random.default_rng(0).lognormal(4, 0.8, 3_000).clip(4, 900).astype(int)
    config = BatchingConfig(strategy="packed", token_budget=2_000)
    plan = plan_epoch(lengths, config, epoch=0, seed=0, world_size=1)
    assert plan.num_micro_batches <= best_fit_decreasing(lengths.tolist(), 2_000)
    assert length_eta2(plan) < 1.5 * plan.num_micro_batches / plan.num_samples


def plain_recurrence(first, second):
    pairs = [frozenset(pair) for group in first for pair in combinations(group, 2)]
    again = {frozenset(pair) for group in second for pair in combinations(group, 2)}
    return sum(pair in again for pair in pairs) / len(pairs) if pairs else 0.0


@QUICK
@given(LENGTHS, st.sampled_from(["sorted", "random", "bucketed", "pooled", "packed"]))
def test_recurrence_counts_every_pair(lengths, strategy):
    first, second = (plan_of(lengths, strategy, epoch, pool_size=20) for epoch in (0, 1))
    assert pair_recurrence(first, second) == plain_recurrence(groups_of(first), groups_of(second))


@pytest.mark.parametrize("dropping", [False, True])
def test_recurrence_and_variance_leave_dropped_samples_out(dropping):
    lengths = [30, 0, 40, 50, 60, 20, 10, 0, 70, 70, 10, 33, 44, 55]
    settings = {
        "oversize": "drop",
        "micro_batches_per_step": 2,
        "tail": "drop" if dropping else "partial",
    }
    first, second = (plan_of(lengths, "random", epoch, **settings) for epoch in (2, 3))
    assert pair_recurrence(first, second) == plain_recurrence(groups_of(first), groups_of(second))
    assert length_eta2(first) == pytest.approx(plain_eta2(groups_of(first), lengths), rel=1e-12)


def plain_eta2(groups, lengths):
    values = [lengths[member] for group in groups for member in group]
    mean = sum(values) / len(values)
    total = sum((value - mean) ** 2 for value in values)
    between = sum(
        len(group) * (sum(lengths[member] for member in group) / len(group) - mean) ** 2
        for group in groups
    )
    return between / total if total else 0.0


@QUICK
@given(LENGTHS, st.sampled_from(["diverse", "synchronised", "random"]))
def test_eta2_is_the_share_between_groups(lengths, mixing):
    plan = plan_of(lengths, "pooled", mixing=mixing, micro_batches_per_step=3, pool_size=30)
    groups = groups_of(plan)
    steps = [
        [sample for index in step[step >= 0] for sample in groups[index]]
        for step in plan.assignment.reshape(plan.num_steps, -1)
    ]
    # Float64 sums of at most 80 terms; cancellation leaves more than 9 digits.
    assert length_eta2(plan) == pytest.approx(plain_eta2(groups, lengths), rel=1e-9, abs=1e-12)
    assert step_length_eta2(plan) == pytest.approx(plain_eta2(steps, lengths), rel=1e-9, abs=1e-12)


@QUICK
@given(LENGTHS, st.integers(1, 4))
def test_the_straggler_factor_is_the_mean_of_max_over_mean(lengths, world_size):
    config = BatchingConfig(strategy="random", token_budget=120, micro_batches_per_step=3)
    plan = plan_epoch(lengths, config, epoch=0, seed=0, world_size=world_size)
    ratios = []
    for step in plan.assignment:
        sums = [
            sum(
                plan.slots[index] * (3_000 + plan.padded_lengths[index])
                for index in step[:, rank]
                if index >= 0
            )
            for rank in range(world_size)
        ]
        ratios.append(max(sums) / (sum(sums) / world_size))
    assert straggler_factor(plan) == pytest.approx(sum(ratios) / len(ratios), rel=1e-12)


@QUICK
@given(st.lists(st.integers(1, 1_000), min_size=6, max_size=6))
def test_ranks_are_balanced_nearly_as_well_as_by_trying_everything(costs):
    placed = assign_ranks(
        "diverse",
        np.arange(6)[None, :],
        np.array(costs),
        world_size=2,
        rng=random_stream(0, 0, 0),
    )
    largest = np.array(costs)[placed[0]].sum(axis=0).max()
    best = min(max(sum(chosen), sum(costs) - sum(chosen)) for chosen in combinations(costs, 3))
    # Longest first into equal numbers of places stays within 4/3 of the best; swaps only help.
    assert largest <= 4 / 3 * best
