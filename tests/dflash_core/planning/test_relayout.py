import numpy as np
import pytest

from dflash_core.planning import BatchingConfig, PlanCost, plan_epoch, relayout

LENGTHS = np.minimum(np.random.default_rng(0).lognormal(4.5, 0.8, 500).astype(np.int64) + 8, 1000)


def planned(mixing, world_size, tail="partial"):
    config = BatchingConfig(
        strategy="pooled",
        mixing=mixing,
        tail=tail,
        token_budget=2048,
        pool_size=64,
        micro_batches_per_step=6,
    )
    return plan_epoch(LENGTHS, config, epoch=0, seed=3, world_size=world_size)


def loads(plan):
    padded = np.append(plan.costs(), 0)
    return np.sort(padded[plan.assignment].sum(axis=1), axis=1)


@pytest.mark.parametrize("tail", ["partial", "repeat", "drop"])
@pytest.mark.parametrize("world_size", [1, 2, 4, 5])
@pytest.mark.parametrize("mixing", ["diverse", "synchronised"])
def test_other_ranks_are_loaded_as_in_a_plan_made_for_them(mixing, world_size, tail):
    found = loads(relayout(planned(mixing, 3, tail), world_size=world_size))
    wanted = loads(planned(mixing, world_size, tail))
    # Of a step that repeats fill up, only the sum is kept.
    np.testing.assert_array_equal(found[:-1], wanted[:-1])
    assert found[-1].sum() == wanted[-1].sum()


@pytest.mark.parametrize("mixing", ["diverse", "synchronised", "random"])
def test_steps_hold_what_they_held(mixing):
    plan = planned(mixing, 3, tail="repeat")
    found = relayout(plan, world_size=4)
    np.testing.assert_array_equal(found.step_of, plan.step_of)
    assert found.loss_weight.sum() == plan.loss_weight.sum() == plan.num_micro_batches
    assert found.content_hash == plan.content_hash
    assert found.layout_hash != plan.layout_hash
    for before, after in zip(plan.assignment, found.assignment, strict=True):
        assert sorted(before[before >= 0]) == sorted(after[after >= 0])


def test_another_measure_balances_by_itself():
    flat = PlanCost(per_micro_batch=1, per_slot=0, per_slot_length=0)
    found = relayout(planned("diverse", 3), world_size=2, cost=flat)
    assert np.ptp(loads(found)[:-1], axis=1).max() == 0  # three micro-batches each
    assert found.identity.cost == flat
