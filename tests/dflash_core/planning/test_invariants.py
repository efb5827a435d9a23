"""What every plan owes: each sample once, no budget exceeded, equal ranks, same seed same plan."""

from typing import get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_core.planning import STRATEGIES, BatchingConfig, EpochPlan, num_anchors, plan_epoch
from dflash_core.planning.config import Mixing, Tail

LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=120)
QUICK = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])

CONFIGS = st.builds(
    BatchingConfig,
    strategy=st.sampled_from(sorted(STRATEGIES)),
    token_budget=st.integers(64, 400),
    max_samples=st.none() | st.integers(1, 9),
    anchor_budget=st.none() | st.integers(8, 40),
    micro_batches_per_step=st.integers(1, 9),
    mixing=st.sampled_from(get_args(Mixing)),
    tail=st.sampled_from([tail for tail in get_args(Tail) if tail != "drop"]),
    num_buckets=st.integers(1, 6),
    pad_to=st.sampled_from(["batch", "edge"]),
    multiple_of=st.sampled_from([1, 8]),
    pool_size=st.integers(1, 50),
    anchors=st.just({"max_anchors": 8}),
)


def plan_of(lengths: list[int], config: BatchingConfig, **changes: int) -> EpochPlan:
    arguments = {"epoch": 0, "seed": 0, "world_size": 2} | changes
    return plan_epoch(lengths, config, supervised=np.array(lengths) // 2, **arguments)


@QUICK
@given(LENGTHS, CONFIGS, st.integers(1, 5))
def test_each_sample_is_planned_exactly_once(lengths, config, world_size):
    plan = plan_of(lengths, config, world_size=world_size)
    counted = plan.assignment[plan.loss_weight == 1]
    assert sorted(counted) == list(range(plan.num_micro_batches))
    samples = np.concatenate([plan.micro_batch(i) for i in range(plan.num_micro_batches)])
    assert sorted(samples) == list(range(len(lengths)))
    assert plan.num_dropped == 0


@QUICK
@given(LENGTHS, CONFIGS)
def test_no_micro_batch_exceeds_a_budget(lengths, config):
    plan = plan_of(lengths, config)
    anchors = num_anchors(np.array(lengths) // 2, config.anchors)
    for index in range(plan.num_micro_batches):
        members = plan.micro_batch(index)
        real = [lengths[member] for member in members]
        slots = plan.padded_length(index) * plan.rows[index]
        assert slots <= config.token_budget
        assert plan.padded_length(index) % config.multiple_of == 0
        assert plan.padded_length(index) >= (sum(real) if plan.packed else max(real))
        assert len(members) <= (config.max_samples or len(members))
        assert anchors[members].sum() == plan.num_anchors[index]
        assert plan.num_anchors[index] <= (config.anchor_budget or plan.num_anchors[index])
    assert 0 < plan.padding_efficiency <= 1


@QUICK
@given(LENGTHS, CONFIGS, st.integers(1, 5))
def test_ranks_run_equal_counts_up_to_the_idle_slots_of_a_step(lengths, config, world_size):
    plan = plan_of(lengths, config, world_size=world_size)
    accumulation = -(-config.micro_batches_per_step // world_size)
    assert plan.assignment.shape == (plan.num_steps, accumulation, world_size)
    busy = (plan.assignment >= 0).sum(axis=1)
    assert np.all(busy.max(axis=1) - busy.min(axis=1) <= 1)
    full = busy.sum(axis=1) == config.micro_batches_per_step
    assert np.all(full[:-1])
    assert full[-1] or config.tail == "partial"


@QUICK
@given(LENGTHS, CONFIGS, st.integers(1, 6))
def test_what_a_step_holds_depends_on_neither_ranks_nor_cost(lengths, config, world_size):
    from dflash_core.planning import PlanCost

    one = plan_of(lengths, config, world_size=1)
    many = plan_epoch(
        lengths,
        config,
        epoch=0,
        seed=0,
        world_size=world_size,
        supervised=np.array(lengths) // 2,
        cost=PlanCost(per_slot=1, per_slot_length=7),
    )
    assert one.num_steps == many.num_steps
    for step in range(one.num_steps):
        assert sorted(one.assignment[step][one.assignment[step] >= 0]) == sorted(
            many.assignment[step][many.assignment[step] >= 0]
        )
    assert one.content_hash == many.content_hash


@QUICK
@given(LENGTHS, CONFIGS)
def test_the_same_seed_gives_the_same_bytes(lengths, config):
    first, second = plan_of(lengths, config), plan_of(np.array(lengths, np.uint16), config)
    for name in ("order", "offsets", "padded_lengths", "assignment", "loss_weight"):
        assert getattr(first, name).tobytes() == getattr(second, name).tobytes()
    assert first.content_hash == second.content_hash
    assert first.layout_hash == second.layout_hash


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_composition_is_drawn_anew_each_epoch_except_for_sorted(strategy):
    lengths = np.random.default_rng(0).integers(1, 64, 400).tolist()
    config = BatchingConfig(strategy=strategy, token_budget=256, pool_size=40, num_buckets=3)
    groups = [
        {frozenset(plan.micro_batch(i)) for i in range(plan.num_micro_batches)}
        for plan in (plan_of(lengths, config, epoch=0), plan_of(lengths, config, epoch=1))
    ]
    assert (groups[0] == groups[1]) == (strategy == "sorted")


@QUICK
@given(st.lists(st.integers(1, 64), min_size=1, max_size=400), st.integers(64, 400))
def test_buckets_are_as_many_as_full_micro_batches_fill(lengths, token_budget):
    """Two of each in the mean; a set that fills them all is planned as it always was."""
    config = BatchingConfig(token_budget=token_budget, num_buckets=6)
    plan = plan_of(lengths, config)
    buckets = plan.identity.config.num_buckets
    assert buckets == 6 or 2 * token_budget * (buckets - 1) < sum(lengths)
    assert buckets == 6 or sum(lengths) <= 2 * token_budget * buckets
    assert plan_of(lengths, plan.identity.config).content_hash == plan.content_hash


def test_a_small_set_is_dealt_anew_every_epoch():
    lengths = np.random.default_rng(0).lognormal(6.0, 0.8, 300).astype(int).clip(20, 8192).tolist()
    plans = [plan_of(lengths, BatchingConfig(), epoch=epoch) for epoch in (0, 1)]
    members = [{frozenset(p.micro_batch(i)) for i in range(p.num_micro_batches)} for p in plans]
    assert not members[0] & members[1]
    assert plans[0].slots.mean() / 49_152 > 0.8  # .15 with 24 buckets
