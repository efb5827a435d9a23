"""When a resume may go on with a plan."""

import pytest

from dflash_core.planning import BatchingConfig, PlanCost, changed_ingredients, plan_epoch

LENGTHS = [10, 20, 30, 0]
CONFIG = BatchingConfig(token_budget=60, micro_batches_per_step=2, oversize="drop")


def plan_of(lengths=LENGTHS, config=CONFIG, **changes):
    arguments = {"epoch": 0, "seed": 0, "world_size": 1, "supervised": [1, 2, 3, 0]} | changes
    return plan_epoch(lengths, config, **arguments)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"lengths": [10, 20, 31, 0]}, "lengths"),
        ({"lengths": [10, 30, 20, 0]}, "lengths"),
        ({"supervised": [1, 2, 2, 0]}, "supervised"),
        ({"supervised": None}, "supervised"),
        ({"seed": 1}, "seed"),
        ({"epoch": 1}, "epoch"),
        ({"config": CONFIG.model_copy(update={"pool_size": 9})}, "batching.pool_size"),
        (
            {"config": CONFIG.model_copy(update={"micro_batches_per_step": 3})},
            "batching.micro_batches_per_step",
        ),
    ],
)
def test_what_is_trained_on_changes_the_content_hash_and_is_named(changes, name):
    stored, current = plan_of(), plan_of(**changes)
    assert stored.content_hash != current.content_hash
    (phrase,) = changed_ingredients(stored.identity.ingredients, current.identity.ingredients)
    assert phrase.startswith(f"{name} was ")


@pytest.mark.parametrize("changes", [{"world_size": 2}, {"cost": PlanCost(per_slot=1)}])
def test_who_runs_it_changes_only_the_layout_hash(changes):
    stored, current = plan_of(), plan_of(**changes)
    assert stored.content_hash == current.content_hash
    assert stored.layout_hash != current.layout_hash


def test_ingredients_that_are_new_or_gone_are_named():
    assert changed_ingredients({"a": "1"}, {"b": "2"}) == [
        "a was 1 and is absent",
        "b was absent and is 2",
    ]


def test_the_number_type_of_lengths_is_no_ingredient():
    assert plan_of().content_hash == plan_of([10.0, 20.0, 30.0, float("nan")]).content_hash
