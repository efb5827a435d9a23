"""What each mixing promises of steps and ranks."""

from itertools import combinations

import numpy as np
import pytest

from dflash_core.errors import PlanError
from dflash_core.planning import BatchingConfig, plan_epoch
from dflash_core.planning.diversity import (
    adjacent_correlation,
    diversity_of,
    step_length_eta2,
    straggler_factor,
)

# The length shape of the run the project starts from, in small.
QUANTILES = (0, 0.167, 0.333, 0.5, 0.667, 0.833, 0.9, 0.99, 1)
TOKENS = (65, 770, 1216, 1727, 2432, 3296, 4200, 4917, 8191)
LENGTHS = np.interp(np.random.default_rng(0).random(30_000), QUANTILES, TOKENS).astype(np.int64)


def plan_of(mixing, *, strategy="pooled", world_size=8, **changes):
    config = BatchingConfig(
        strategy=strategy,
        mixing=mixing,
        **({"micro_batches_per_step": 32} | changes),
    )
    return plan_epoch(LENGTHS, config, epoch=0, seed=0, world_size=world_size)


def test_diverse_steps_hold_the_epochs_mix_and_wait_for_no_rank():
    plan = plan_of("diverse", tail="drop")
    assert straggler_factor(plan) < 1.02
    assert step_length_eta2(plan) < 0.01
    for step in plan.assignment:
        means = np.sort(plan.real_tokens[step.ravel()] / np.diff(plan.offsets)[step.ravel()])
        assert means[0] < np.quantile(LENGTHS, 0.25)
        assert means[-1] > np.quantile(LENGTHS, 0.95)


def test_synchronised_ranks_run_like_shapes_at_the_same_time():
    plan = plan_of("synchronised", tail="drop")
    at_once = plan.padded_lengths[plan.assignment]
    spread = at_once.max(axis=2) / at_once.min(axis=2)
    assert np.median(spread) < 1.05
    assert straggler_factor(plan) < 1.02
    assert step_length_eta2(plan) > 0.9


def test_random_mixing_waits_and_is_what_chance_gives():
    plan = plan_of("random", tail="drop")
    assert straggler_factor(plan) > straggler_factor(plan_of("diverse", tail="drop"))
    assert 0.01 < step_length_eta2(plan) < 0.5


def test_packed_and_diverse_steps_differ_less_than_chance_would_have_it():
    report = diversity_of(plan_of("diverse", strategy="packed", tail="drop"))
    assert report.step_length_eta2 < report.step_length_eta2_floor


@pytest.mark.parametrize("mixing", ["diverse", "synchronised", "random"])
def test_no_rank_always_carries_the_most(mixing):
    plan = plan_of(mixing, micro_batches_per_step=8, tail="drop")
    loads = plan.costs()[plan.assignment].sum(axis=1)
    heaviest = np.bincount(loads.argmax(axis=1), minlength=8)
    assert heaviest.max() < 0.4 * plan.num_steps


def test_steps_of_fixed_micro_batches_are_drawn_anew_each_epoch():
    """Sorted micro-batches never change; which of them share a step does."""
    config = BatchingConfig(strategy="sorted", token_budget=8_192, micro_batches_per_step=16)
    seen = []
    for epoch in (0, 1):
        plan = plan_epoch(LENGTHS, config, epoch=epoch, seed=0, world_size=4)
        steps = plan.assignment.reshape(plan.num_steps, -1)
        seen.append({frozenset(pair) for step in steps for pair in combinations(step, 2)})
    assert len(seen[0] & seen[1]) < 0.2 * len(seen[0])


@pytest.mark.parametrize("mixing", ["diverse", "synchronised", "random"])
@pytest.mark.parametrize(
    ("tail", "steps", "counted"), [("partial", 3, 10), ("repeat", 3, 10), ("drop", 2, 8)]
)
def test_the_tail_is_short_filled_or_dropped_and_counted(mixing, tail, steps, counted):
    config = BatchingConfig(
        strategy="random", token_budget=10, micro_batches_per_step=4, mixing=mixing, tail=tail
    )
    plan = plan_epoch([10] * 10, config, epoch=0, seed=0, world_size=2)
    assert (plan.num_steps, plan.num_micro_batches) == (steps, counted)
    assert plan.loss_weight.sum() == counted == len(set(plan.order))
    assert plan.dropped == ({"tail": 2} if tail == "drop" else {})
    assert plan.num_repeats == (2 if tail == "repeat" else 0)
    assert (plan.assignment < 0).sum() == (2 if tail == "partial" else 0)
    if tail == "repeat":
        last = plan.assignment[-1][plan.loss_weight[-1] == 0]
        assert len(set(last)) == 2
        assert plan.padding_efficiency == 10 / 12  # copies hold slots and no real tokens


def test_a_repeat_of_too_few_micro_batches_repeats_more_than_once():
    config = BatchingConfig(
        strategy="random", token_budget=10, micro_batches_per_step=4, tail="repeat"
    )
    plan = plan_epoch([10], config, epoch=0, seed=0, world_size=4)
    assert plan.assignment.tolist() == [[[0, 0, 0, 0]]]
    assert plan.loss_weight.sum() == 1


def test_no_full_step_and_none_allowed_to_be_short_is_refused():
    config = BatchingConfig(token_budget=10, micro_batches_per_step=4, tail="drop")
    with pytest.raises(PlanError, match="3 micro-batches fill no step of 4"):
        plan_epoch([10] * 3, config, epoch=0, seed=0, world_size=1)


def test_more_micro_batches_a_step_than_ranks_accumulate_and_fewer_leave_ranks_idle():
    assert plan_of("diverse", micro_batches_per_step=12).assignment.shape[1:] == (2, 8)
    plan = plan_of("diverse", micro_batches_per_step=4, tail="drop")
    assert plan.assignment.shape[1:] == (1, 8)
    assert np.all((plan.assignment >= 0).sum(axis=(1, 2)) == 4)


def test_neighbours_on_a_rank_are_told_by_their_correlation():
    constant = plan_epoch([5] * 50, BatchingConfig(token_budget=10), epoch=0, seed=0, world_size=2)
    assert adjacent_correlation(constant) == 0
    assert adjacent_correlation(plan_of("synchronised")) > 0.5
    assert abs(adjacent_correlation(plan_of("random"))) < 0.2


def test_packed_samples_share_row_0():
    plan = plan_of("diverse", strategy="packed")
    assert plan.document_rows(0).tolist() == [0] * len(plan.micro_batch(0))
    padded = plan_of("diverse")
    assert padded.document_rows(0).tolist() == list(range(len(padded.micro_batch(0))))
