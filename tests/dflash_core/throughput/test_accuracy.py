import pytest

from dflash_core.errors import DataError
from dflash_core.throughput import hold_against, learn_drift, predict
from tests.dflash_core.throughput.machines import machine, plan

PREDICTION = predict(plan(), machine(), block_size=8)


def lines(speeds, *, epoch=0, busy=None):
    """Steps of 1,000 tokens at so many thousand tokens per second."""
    return [
        {"epoch": epoch, "real_tokens": 1000, "step_s": 1 / speed, "busy_shares": busy or {}}
        for speed in speeds
    ]


def forecast(ktok_s):
    update = {"ktok_s": ktok_s, "low": ktok_s * 0.9, "high": ktok_s * 1.1}
    return PREDICTION.model_copy(update=update)


def test_each_epoch_is_held_against_the_prediction():
    run = lines([2.0] * 10) + lines([2.5] * 10, epoch=1, busy={"target": 0.5})
    found = hold_against(run, forecast(2.0))
    assert [epoch.measured_ktok_s for epoch in found.epochs] == pytest.approx([2.0, 2.5])
    assert [epoch.error for epoch in found.epochs] == pytest.approx([0.0, -0.2])
    assert [epoch.inside for epoch in found.epochs] == [True, False]
    assert found.epochs[1].measured_busy == pytest.approx({"target": 0.5})
    assert found.epochs[0].predicted_busy.keys() == {"prefetch", "target", "draft"}
    assert not found.inside


def test_epochs_that_read_features_are_held_against_their_own_prediction():
    whole = forecast(3.0).model_copy(update={"first": forecast(2.0), "later": forecast(4.0)})
    run = lines([2.0] * 10) + lines([4.0] * 10, epoch=1) + lines([5.0] * 10, epoch=2)
    found = hold_against(run, whole)
    assert [epoch.predicted_ktok_s for epoch in found.epochs] == [2.0, 4.0, 4.0]
    assert [epoch.error for epoch in found.epochs] == pytest.approx([0.0, 0.0, -0.2])
    steps = (8, 20)  # two warm up
    assert found.predicted_ktok_s == pytest.approx(28 / (steps[0] / 2 + steps[1] / 4))


def test_slow_first_steps_do_not_count():
    found = hold_against(lines([0.1] * 2 + [2.0] * 38), forecast(2.0))
    assert found.error == pytest.approx(0.0)
    assert found.inside


def test_a_run_without_steps_is_refused():
    with pytest.raises(DataError, match="no steps"):
        hold_against([], PREDICTION)


def test_without_runs_a_machine_is_trusted_to_5_percent():
    assert learn_drift([]).drift == pytest.approx(0.05)


def test_runs_as_predicted_narrow_the_interval_and_others_widen_it():
    assert learn_drift([1.0, 1.01, 0.99]).drift < 0.05
    assert learn_drift([0.7, 1.3]).drift > 0.15
    assert learn_drift([0.7, 1.3]).warning == ""


def test_a_machine_that_keeps_straying_to_one_side_is_reported():
    found = learn_drift([1.0, 0.8, 0.78, 0.81])
    assert "20% slower than predicted; calibrate" in found.warning
    assert "faster" in learn_drift([1.3, 1.2, 1.25]).warning


def test_the_last_three_runs_decide_whether_to_calibrate_again():
    assert "30% slower than predicted" in learn_drift([1.0] * 10 + [0.7] * 3).warning
    assert learn_drift([0.8] * 10 + [1.0] * 3).warning == ""
    assert learn_drift([0.8, 0.8, 0.95]).warning == ""
    assert "--again" in learn_drift([0.8] * 3).warning


def test_a_calibration_that_was_unsure_stays_so_until_runs_say_otherwise():
    assert learn_drift([], prior=0.4).drift == pytest.approx(0.4)
    assert learn_drift([1.0] * 20, prior=0.4).drift < 0.15


def test_only_recent_runs_count():
    assert learn_drift([0.5] * 50 + [1.0] * 20).drift < 0.05
