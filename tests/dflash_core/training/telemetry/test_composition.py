"""The adjusted loss and the forgetting alarm, on traces whose answer is known."""

import numpy as np
import pytest

from dflash_core.training.batches.length_groups import NUM_GROUPS, group_of, length_edges
from dflash_core.training.telemetry.composition import CompositionMonitor
from dflash_core.training.telemetry.forgetting import forgotten_groups

POSITIONS = 4
MEANS = np.linspace(1.0, 4.0, NUM_GROUPS)[:, None] + np.linspace(0.0, 1.0, POSITIONS)


def observe(monitor, rng, *, drift=0.0, noise=0.0, means=MEANS):
    """One step with random composition; returns raw loss and what the monitor says of it."""
    weight = rng.gamma(0.5, 100.0, (NUM_GROUPS, 1)) * np.linspace(1.0, 0.3, POSITIONS)
    loss = weight * (means + drift + noise * rng.standard_normal(means.shape))
    return loss.sum() / weight.sum(), monitor.observe(loss, weight)


def test_pure_composition_noise_is_explained_away():
    monitor, rng = CompositionMonitor(), np.random.default_rng(0)
    raw, adjusted = [], []
    for _ in range(200):
        loss, judged = observe(monitor, rng)
        raw.append(loss)
        adjusted.append(judged.adjusted)
    assert judged.explained_share > 0.9
    assert np.std(adjusted[100:]) < 0.25 * np.std(raw[100:])


def test_pure_divergence_is_not_explained():
    """All groups lose alike and get worse: the adjusted loss rises as the raw one does."""
    monitor, rng = CompositionMonitor(), np.random.default_rng(0)
    flat = np.full_like(MEANS, 2.0)
    judged = [observe(monitor, rng, drift=0.02 * step, means=flat)[1] for step in range(200)]
    assert judged[-1].explained_share < 0.1
    # Groups that were rare of late have older means: 5 %.
    assert judged[-1].adjusted - judged[50].adjusted == pytest.approx(0.02 * 149, rel=0.05)


def test_divergence_shows_through_composition_noise():
    monitor, rng = CompositionMonitor(), np.random.default_rng(1)
    for _ in range(150):
        observe(monitor, rng)
    found = [observe(monitor, rng, drift=1.5)[1] for _ in range(3)]
    assert all(step.adjusted - step.expected > 0 for step in found)
    assert found[0].adjusted == pytest.approx(np.average(MEANS) + 1.5, abs=0.6)


def test_a_resumed_monitor_goes_on_alike():
    whole, rng = CompositionMonitor(), np.random.default_rng(0)
    for _ in range(40):
        observe(whole, rng)
    resumed = CompositionMonitor()
    resumed.load(whole.state())
    again = np.random.default_rng(5)
    assert observe(whole, np.random.default_rng(5)) == observe(resumed, again)


def test_steps_without_weight_or_with_nan_leave_the_means_alone():
    monitor = CompositionMonitor()
    empty = np.zeros((NUM_GROUPS, POSITIONS))
    assert np.isnan(monitor.observe(empty, empty).adjusted)
    monitor.observe(MEANS, np.ones_like(MEANS))
    monitor.observe(np.full_like(MEANS, np.nan), np.ones_like(MEANS))
    assert monitor.observe(MEANS, np.ones_like(MEANS)).adjusted == pytest.approx(MEANS.mean())


def test_length_groups_hold_equally_many_and_take_what_is_longer():
    lengths = np.arange(60)
    groups = group_of(np.append(lengths, 10_000), length_edges(lengths))
    assert np.bincount(groups[:-1]).tolist() == [10] * NUM_GROUPS
    assert groups[-1] == NUM_GROUPS - 1


GROUPS = np.repeat(np.arange(4), 40)


def measurements(rng, num, *, slope=-0.05, forgotten=None, forgets_by=0.1):
    """Losses of 160 samples: a spread between them, a common trend, and noise."""
    own = rng.normal(3.0, 1.0, GROUPS.size)
    rise = np.where(forgotten == GROUPS, forgets_by - slope, 0.0)
    return [own + (slope + rise) * step + rng.normal(0.0, 0.2, GROUPS.size) for step in range(num)]


def test_one_forgotten_group_is_named():
    history = measurements(np.random.default_rng(0), 5, forgotten=2, forgets_by=0.2)
    assert forgotten_groups(history, GROUPS, false_alarm_rate=0.01) == [2]


def test_slow_forgetting_is_seen_over_several_measurements():
    rng = np.random.default_rng(4)
    history = measurements(rng, 5, forgotten=1, forgets_by=0.05)
    assert forgotten_groups(history[-2:], GROUPS, false_alarm_rate=0.01) == []
    assert forgotten_groups(history, GROUPS, false_alarm_rate=0.01) == [1]


def test_false_alarms_stay_under_the_stated_rate():
    """400 measurements without change: 3 sigma above a rate of 5 % is 8.3 %."""
    rng = np.random.default_rng(2)
    alarms = sum(
        bool(forgotten_groups(measurements(rng, 5, slope=0.0), GROUPS, false_alarm_rate=0.05))
        for _ in range(400)
    )
    assert alarms / 400 < 0.083


def test_a_loss_that_rises_everywhere_is_divergence_and_not_forgetting():
    history = measurements(np.random.default_rng(3), 5, slope=0.3)
    assert forgotten_groups(history, GROUPS, false_alarm_rate=0.01) == []
