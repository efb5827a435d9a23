"""The comparison that people and programs read."""

import json
from itertools import count

import numpy as np
import pytest

from dflash_core.planning import (
    STRATEGIES,
    BatchingConfig,
    compare_strategies,
    comparison_json,
    diversity_of,
    plan_epoch,
)

LENGTHS = np.random.default_rng(0).integers(10, 400, 3_000)
CONFIG = BatchingConfig(token_budget=2_000, micro_batches_per_step=8, pool_size=300)


def compare(**changes):
    arguments = {
        "strategies": list(STRATEGIES),
        "mixings": ["diverse", "random"],
        "seed": 0,
        "world_size": 4,
        "supervised": LENGTHS // 2,
    } | changes
    return compare_strategies(LENGTHS, CONFIG, **arguments)


def test_each_strategy_is_reported_under_each_mixing():
    reports = compare()
    assert [(report.name, report.mixing) for report in reports] == [
        (name, mixing) for name in STRATEGIES for mixing in ("diverse", "random")
    ]
    row = {report.name: report for report in reports if report.mixing == "diverse"}
    assert row["sorted"].pair_recurrence == 1
    assert row["random"].pair_recurrence < row["pooled"].pair_recurrence < 1
    assert row["packed"].padding_efficiency == 1
    assert row["random"].padding_efficiency < row["bucketed"].padding_efficiency
    assert row["packed"].length_eta2_vs_random < row["sorted"].length_eta2_vs_random
    for report in reports:
        assert report.max_slots <= 2_000
        assert (
            report.diversity.supervised_per_step.most
            <= report.diversity.supervised_per_step.mean * 2
        )
        assert report.plan.num_steps == report.num_steps


@pytest.mark.parametrize("tail", ["partial", "repeat", "drop"])
def test_each_row_holds_the_plan_that_planning_it_alone_gives(tail):
    config = CONFIG.model_copy(update={"tail": tail})
    settings = {"seed": 5, "world_size": 4, "supervised": LENGTHS // 2}
    mixings = ["diverse", "synchronised", "random"]
    for report in compare_strategies(
        LENGTHS, config, strategies=["packed", "pooled"], mixings=mixings, **settings
    ):
        own = config.model_copy(update={"strategy": report.name, "mixing": report.mixing})
        alone = plan_epoch(LENGTHS, own, epoch=0, **settings)
        for name in ("order", "offsets", "real_tokens", "supervised_tokens", "assignment"):
            assert np.array_equal(getattr(report.plan, name), getattr(alone, name))
        assert report.plan.content_hash == alone.content_hash


def test_programs_get_plain_numbers_without_the_plans():
    result = comparison_json(compare(strategies=["pooled"]), 2_000, details=True)
    text = json.dumps(result)
    assert "NaN" not in text
    assert result["num_samples"] == 3_000
    assert result["total_tokens"] == int(LENGTHS.sum())
    assert result["strategies"][0]["diversity"]["samples_per_micro_batch"]["least"] >= 1
    assert "plan" not in result["strategies"][0]


def test_planning_is_timed_by_the_given_clock():
    ticks = count()
    (report,) = compare(strategies=["sorted"], mixings=["random"], clock=lambda: float(next(ticks)))
    assert report.plan_s == 2.0  # composing, which all mixings share, and mixing


def test_equal_lengths_have_no_variance_to_share():
    (report,) = compare_strategies(
        [7] * 40, CONFIG, strategies=["random"], mixings=["diverse"], seed=0, world_size=1
    )
    assert (report.length_eta2, report.length_eta2_vs_random) == (0.0, None)
    assert report.diversity.supervised_per_step is None
    assert diversity_of(report.plan).pair_recurrence is None
