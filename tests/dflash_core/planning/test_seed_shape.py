"""The figures of the run that this project started from, and what the planner owes on its lengths.

902,087 samples, budget 49,152; 32 micro-batches a step on 8 ranks.
"""

import numba
import numpy as np
import pytest

from dflash_core.bucketing import edge_efficiency, fit_buckets
from dflash_core.planning import BatchingConfig, EpochPlan, diversity_of, plan_epoch

QUANTILES = (0, 0.167, 0.333, 0.5, 0.667, 0.833, 0.9, 0.99, 1)
TOKENS = (65, 770, 1216, 1727, 2432, 3296, 4200, 4917, 8191)
GIVEN_EDGES = (770, 1216, 1728, 2432, 3296, 8192)

pytestmark = pytest.mark.skipif(
    bool(numba.config.DISABLE_JIT), reason="a million samples take minutes as plain Python"
)


@pytest.fixture(scope="module")
def lengths() -> np.ndarray:
    draws = np.random.default_rng(0).random(902_087)
    return np.interp(draws, QUANTILES, TOKENS).astype(np.int64)


def plan_of(lengths: np.ndarray, strategy: str, epoch: int = 0, **settings: object) -> EpochPlan:
    config = BatchingConfig(
        strategy=strategy, token_budget=49_152, micro_batches_per_step=32, **settings
    )
    return plan_epoch(lengths, config, epoch=epoch, seed=0, world_size=8)


@pytest.mark.parametrize(
    ("strategy", "settings", "digits", "efficiency"),
    [
        ("sorted", {}, 4, 0.9999),
        ("random", {}, 3, 0.470),
        ("bucketed", {"edges": GIVEN_EDGES}, 3, 0.827),
    ],
)
def test_the_start_up_runs_figures_come_out(lengths, strategy, settings, digits, efficiency):
    assert int(lengths.sum()) == 1_831_617_928
    plan = plan_of(lengths, strategy, **settings)
    assert round(plan.padding_efficiency, digits) == efficiency
    assert plan.slots.max() <= 49_152


def test_pooled_and_diverse_pads_little_waits_little_and_mixes_all_at_once(lengths):
    plan, following = (plan_of(lengths, "pooled", epoch) for epoch in (0, 1))
    report = diversity_of(plan, following)
    assert plan.padding_efficiency >= 0.990
    assert report.pair_recurrence is not None
    assert report.pair_recurrence <= 6e-3
    assert report.straggler_factor <= 1.02
    assert report.step_length_eta2 <= 0.01
    assert plan.slots.max() <= 49_152


def test_packed_fills_its_rows_and_is_as_diverse_as_chance(lengths):
    plan = plan_of(lengths, "packed")
    assert int(plan.slots.sum()) / (plan.num_micro_batches * 49_152) >= 0.9999
    assert diversity_of(plan).length_eta2 <= 0.06


@pytest.mark.parametrize(("num_buckets", "efficiency"), [(24, 0.9486), (32, 0.9609)])
def test_fitted_edges_are_as_good_as_brute_force_found(lengths, num_buckets, efficiency):
    edges = fit_buckets(lengths, num_buckets=num_buckets)
    assert edge_efficiency(lengths, edges) == pytest.approx(efficiency, abs=5e-5)
