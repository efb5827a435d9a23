"""Inputs on which other samplers crash, hang or silently lose data; each with every strategy."""

import numpy as np
import pytest

from dflash_core.errors import ConfigError, DataError, PlanError
from dflash_core.planning import STRATEGIES, BatchingConfig, EpochPlan, PlanCost, plan_epoch
from dflash_core.planning.limits import check_population
from dflash_core.profiling import Screened

every_strategy = pytest.mark.parametrize("strategy", sorted(STRATEGIES))


def plan_of(lengths, strategy, *, world_size=1, supervised=None, **settings) -> EpochPlan:
    defaults = {"token_budget": 100, "micro_batches_per_step": 4, "pool_size": 50, "num_buckets": 4}
    config = BatchingConfig(strategy=strategy, **(defaults | settings))
    return plan_epoch(
        lengths, config, epoch=0, seed=0, world_size=world_size, supervised=supervised
    )


def samples_of(plan: EpochPlan) -> list[int]:
    return sorted(plan.order.tolist())


@every_strategy
def test_all_lengths_equal(strategy):
    plan = plan_of([25] * 40, strategy)
    assert plan.padding_efficiency == 1
    assert plan.num_micro_batches == 10
    assert samples_of(plan) == list(range(40))


@every_strategy
def test_nearly_all_samples_at_the_cap(strategy):
    lengths = [100] * 95 + [20] * 5
    plan = plan_of(lengths, strategy)
    assert samples_of(plan) == list(range(100))
    assert plan.slots.max() == 100
    full = np.flatnonzero(plan.real_tokens == 100)
    assert sum(len(plan.micro_batch(i)) == 1 for i in full) == 95


@every_strategy
def test_two_distinct_lengths_and_more_buckets_than_lengths(strategy):
    plan = plan_of([10] * 20 + [50] * 20, strategy, num_buckets=64)
    assert samples_of(plan) == list(range(40))
    if strategy in ("sorted", "bucketed"):
        assert plan.num_micro_batches == 2 + 10
        assert plan.padding_efficiency == 1


@every_strategy
def test_one_sample_exactly_at_the_budget_is_fine(strategy):
    plan = plan_of([100, 10, 20], strategy)
    assert samples_of(plan) == [0, 1, 2]
    assert plan.slots.max() == 100


@every_strategy
@pytest.mark.parametrize(
    ("oversize", "planned", "dropped", "truncated"),
    [("truncate", [0, 1, 2], 0, 1), ("drop", [1, 2], 1, 0)],
)
def test_one_sample_over_the_budget(strategy, oversize, planned, dropped, truncated):
    with pytest.raises(DataError, match=r"sample 0 has 101 tokens but batching\.token_budget"):
        plan_of([101, 10, 20], strategy)
    plan = plan_of([101, 10, 20], strategy, oversize=oversize)
    assert samples_of(plan) == planned
    assert (plan.num_dropped, plan.num_truncated) == (dropped, truncated)
    assert plan.dropped == ({"oversize": 1} if dropped else {})
    assert plan.max_length == 100
    assert plan.slots.max() <= 100


@every_strategy
def test_a_multiple_shrinks_what_fits(strategy):
    plan = plan_of([96, 97], strategy, multiple_of=32, oversize="drop")
    assert (plan.max_length, plan.num_dropped, plan.slots.tolist()) == (96, 1, [96])
    with pytest.raises(ConfigError, match=r"multiple_of 128 exceeds batching\.token_budget 100"):
        plan_of([5], strategy, multiple_of=128)


@every_strategy
def test_a_budget_under_the_shortest_sample(strategy):
    with pytest.raises(DataError, match="30 tokens"):
        plan_of([30, 40], strategy, token_budget=8)
    with pytest.raises(PlanError, match="no samples to plan after 2 were dropped"):
        plan_of([30, 40], strategy, token_budget=8, oversize="drop")
    plan = plan_of([30, 40], strategy, token_budget=8, oversize="truncate")
    assert plan.slots.tolist() == [8, 8]


@every_strategy
def test_no_samples_at_all(strategy):
    with pytest.raises(PlanError, match="there are no samples to plan; give samples"):
        plan_of([], strategy)


@every_strategy
def test_a_single_sample(strategy):
    plan = plan_of([7], strategy, world_size=8, micro_batches_per_step=8)
    assert (plan.num_micro_batches, plan.num_steps) == (1, 1)
    assert (plan.assignment >= 0).sum() == 1
    assert plan.micro_batch(0).tolist() == [0]


@every_strategy
def test_fewer_samples_than_ranks(strategy):
    plan = plan_of([90, 80, 70], strategy, world_size=4)
    assert plan.assignment.shape == (1, 1, 4)
    assert (plan.assignment >= 0).sum() == 3
    filled = plan_of([90, 80, 70], strategy, world_size=4, tail="repeat")
    assert (filled.assignment >= 0).all()
    assert filled.loss_weight.sum() == 3
    with pytest.raises(PlanError, match=r"3 samples leave some of 4 ranks idle.*batching\.tail"):
        plan_of([90, 80, 70], strategy, world_size=4, tail="drop")


@every_strategy
def test_samples_that_ranks_do_not_divide(strategy):
    # The reported hang: 9 samples, 2 ranks, one sample each: 5 against 4 batches.
    plan = plan_of([60] * 9, strategy, world_size=2, micro_batches_per_step=2, tail="repeat")
    per_rank = (plan.assignment >= 0).sum(axis=(0, 1))
    assert per_rank.tolist() == [5, 5]
    assert plan.loss_weight.sum() == 9
    # And by ceil: 9 over 4 ranks gave 3, 3, 3, 0.
    plan = plan_of([60] * 9, strategy, world_size=4, micro_batches_per_step=9)
    assert sorted((plan.assignment >= 0).sum(axis=(0, 1))) == [2, 2, 2, 3]


BAD = [0, None, float("nan"), -5, 2**63 - 1]


@every_strategy
@pytest.mark.parametrize("bad", BAD)
def test_lengths_that_are_none_are_refused_or_dropped_and_counted(strategy, bad):
    lengths = [10, bad, 20]
    with pytest.raises(DataError, match=r"sample 1 has .*; set oversize to 'drop'"):
        plan_of(lengths, strategy)
    for oversize in ("drop", "truncate"):
        plan = plan_of(lengths, strategy, oversize=oversize)
        assert samples_of(plan) == [0, 2]
        assert plan.num_dropped == sum(plan.dropped.values()) == 1


@every_strategy
def test_every_bad_length_has_its_own_reason(strategy):
    plan = plan_of([10, *BAD, 101], strategy, oversize="drop")
    assert plan.dropped == {"null": 2, "zero": 1, "negative": 1, "absurd": 1, "oversize": 1}


@every_strategy
def test_sums_beyond_32_bits(strategy):
    lengths = np.full(902_087, 8_191, dtype=np.uint16)
    plan = plan_of(lengths, strategy, token_budget=902_087 * 8_191)
    assert plan.num_micro_batches == 1
    assert plan.slots.tolist() == plan.real_tokens.tolist() == [7_388_994_617]
    assert plan.costs().tolist() == [7_388_994_617 * 3_000 + (902_087 * 8_191**2)]


@every_strategy
def test_costs_beyond_64_bits_are_refused(strategy):
    cost = PlanCost(per_slot=2**24, per_slot_length=2**16)
    config = BatchingConfig(strategy=strategy, token_budget=2**40, micro_batches_per_step=2**20)
    with pytest.raises(PlanError, match="exceeds 64 bits"):
        plan_epoch([2**30] * 8, config, epoch=0, seed=0, world_size=1, cost=cost)


@every_strategy
def test_one_giant_among_short_samples(strategy):
    # A budget counted in real tokens would let 100 short rows be padded to the giant's length.
    plan = plan_of([1_000] + [10] * 300, strategy, token_budget=1_200)
    assert samples_of(plan) == list(range(301))
    assert plan.slots.max() <= 1_200
    if strategy == "sorted":
        assert plan.num_micro_batches == 4  # 120, 120, 60 short ones, and the giant


@every_strategy
def test_an_empty_first_bucket_and_a_bucket_of_one(strategy):
    plan = plan_of([50, 30, 30], strategy, edges=(10, 40, 60))
    assert samples_of(plan) == [0, 1, 2]
    if strategy == "bucketed":
        assert sorted(plan.rows.tolist()) == [1, 2]


def test_edges_bound_the_longest_sample_and_the_budget():
    with pytest.raises(DataError, match=r"70 tokens but the last of batching\.edges is 60"):
        plan_of([70], "bucketed", edges=(10, 60))
    with pytest.raises(ConfigError, match=r"last edge has 160 slots but batching\.token_budget"):
        plan_of([70], "bucketed", edges=(10, 160), pad_to="edge")
    plan = plan_of([70, 5], "bucketed", edges=(10, 160))
    assert sorted(plan.padded_lengths.tolist()) == [5, 70]


def test_padding_to_the_edge_gives_one_length_per_bucket():
    lengths = np.random.default_rng(0).integers(1, 50, 200)
    plan = plan_of(lengths, "bucketed", edges=(10, 25, 50), pad_to="edge")
    assert set(plan.padded_lengths) == {10, 25, 50}
    assert plan.slots.max() <= 100


@every_strategy
def test_long_lengths_beyond_any_table(strategy):
    plan = plan_of([5_000_000, 3, 4_999_999, 4], strategy, token_budget=2**23)
    assert samples_of(plan) == [0, 1, 2, 3]
    assert plan.slots.max() <= 2**23


@every_strategy
def test_one_sample_per_micro_batch_is_enough_limit(strategy):
    plan = plan_of([5] * 1_000, strategy, max_samples=1)
    assert plan.num_micro_batches == 1_000


@every_strategy
def test_anchor_budgets(strategy):
    supervised = np.full(30, 8)
    settings = {"supervised": supervised, "anchors": {"anchors_per_supervised_token": 0.5}}
    plan = plan_of([10] * 30, strategy, anchor_budget=12, **settings)
    assert plan.num_anchors.max() == 12  # three samples of four anchors
    assert plan.num_micro_batches == 10
    assert plan.supervised_tokens.sum() == 240
    with pytest.raises(ConfigError, match="needs the supervised tokens"):
        plan_of([10] * 30, strategy, anchor_budget=12)
    with pytest.raises(PlanError, match=r"a sample has 4 anchors but batching\.anchor_budget is 3"):
        plan_of([10] * 30, strategy, anchor_budget=3, **settings)


@pytest.mark.parametrize(
    ("supervised", "words"),
    [([1, 2], "shape"), ([1.0, 2.0, 3.0], "type float64"), ([1, -2, 3], "sample 1 has -2")],
)
def test_supervised_tokens_that_are_none_are_refused(supervised, words):
    with pytest.raises(DataError, match=words):
        plan_of([10, 20, 30], "sorted", supervised=supervised)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epoch": -1}, "epoch is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"world_size": 0}, "world_size is 0; give at least 1"),
    ],
)
def test_impossible_arguments_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        plan_epoch([1], BatchingConfig(), **({"epoch": 0, "seed": 0, "world_size": 1} | changes))


def test_an_unknown_strategy_names_those_there_are():
    with pytest.raises(ConfigError, match=r"unknown strategy 'best'.*sorted, random, bucketed"):
        plan_of([1], "best")


@pytest.mark.parametrize("edges", [(), (5, 5), (0, 4), tuple(range(1, 200))])
def test_edges_must_increase(edges):
    with pytest.raises(ValueError, match="edges"):
        BatchingConfig(edges=edges)


def test_micro_batches_outside_the_plan_are_refused():
    plan = plan_of([10, 20], "sorted")
    with pytest.raises(IndexError, match="micro-batch 9"):
        plan.micro_batch(9)
    with pytest.raises(IndexError, match="micro-batch -1"):
        plan.padded_length(-1)


def test_a_shorter_maximum_than_the_budget_is_named():
    with pytest.raises(DataError, match=r"70 tokens but batching\.max_length is 60"):
        plan_of([70], "sorted", max_length=60)


def test_more_samples_than_32_bits_number_are_refused():
    screened = Screened(np.ones(1, np.int32), None, {}, 2**31, 0)
    with pytest.raises(PlanError, match="plan them in parts"):
        check_population(screened, BatchingConfig(), 1, 10)


def test_anchor_rules_that_contradict_are_refused():
    with pytest.raises(ValueError, match="min_anchors 9 is over max_anchors 8"):
        BatchingConfig(anchors={"min_anchors": 9, "max_anchors": 8})


def test_no_given_edges_means_fitted_ones():
    lengths = 40 * [5, 9]
    assert plan_of(lengths, "bucketed", edges=None).padding_efficiency == 1


@pytest.mark.parametrize("count", [261, 2_000])  # 260 are guessed: the very last, or one within
def test_many_small_groups_outgrow_the_first_guess_of_their_number(count):
    plan = plan_of([1] * count, "sorted", max_samples=1, token_budget=10_000)
    assert plan.num_micro_batches == count
