import numpy as np
import pytest

from dflash_core.errors import CalibrationError
from dflash_core.throughput import Measurement, Workload, fit_role
from dflash_core.throughput.cost import ROLE_TERMS
from tests.dflash_core.throughput.machines import DRAFT, TARGET

GRID = [
    (rows, length, share)
    for length in (32, 100, 400, 1000)
    for rows in (1, 4, 10)
    for share in (0.0, 0.3)
]


def measured(role, truth, *, noise=0.0, grid=GRID, seed=0):
    rng = np.random.default_rng(seed)
    found = []
    for cell, (rows, length, share) in enumerate(grid):
        anchors = round(rows * length * share) * 8
        shape = Measurement(
            role=role,
            rows=rows,
            padded_length=length,
            real_tokens=rows * length,
            anchor_tokens=anchors,
            anchor_contexts=anchors * length,
            seconds=1.0,
            cell=cell,
        )
        seconds = float(truth.seconds(Workload.of_measurements([shape]).amounts)[0])
        found.append(
            shape.model_copy(update={"seconds": seconds * float(np.exp(rng.normal(0, noise)))})
        )
    return found


@pytest.mark.parametrize(("role", "truth"), [("target", TARGET), ("draft", DRAFT)])
def test_exact_timings_give_back_the_true_terms(role, truth):
    fit = fit_role(measured(role, truth), role)
    for name in ROLE_TERMS[role]:
        assert getattr(fit.coefficients, name) == pytest.approx(getattr(truth, name), rel=1e-6)
    assert fit.held_out_error < 1e-9
    assert len(fit.alternatives) == len(GRID)


def test_noise_shows_in_the_held_out_error_and_the_terms_stay_non_negative():
    fit = fit_role(measured("draft", DRAFT, noise=0.1), "draft")
    assert 0.02 < fit.held_out_error < 0.2
    assert min(fit.coefficients.model_dump().values()) >= 0


def test_one_disturbed_timing_moves_the_fit_by_little():
    timings = measured("target", TARGET, noise=0.01)
    clean = fit_role(timings, "target").coefficients
    timings[7] = timings[7].model_copy(update={"seconds": timings[7].seconds * 4})
    disturbed = fit_role(timings, "target").coefficients
    assert disturbed.slot_s == pytest.approx(clean.slot_s, rel=0.1)


def test_terms_that_only_grow_together_are_named():
    grid = [(rows, 100, 0.25) for rows in range(1, 9)]
    fit = fit_role(measured("target", TARGET, grid=grid), "target")
    assert fit.inseparable == ("target: token slot and token slot x row length",)


def test_a_target_is_not_fitted_with_anchor_terms():
    coefficients = fit_role(measured("target", TARGET, noise=0.05), "target").coefficients
    assert coefficients.anchor_token_s == coefficients.anchor_context_s == 0


@pytest.mark.parametrize(
    ("timings", "message"),
    [
        ([], "0 measured target shapes"),
        (measured("target", TARGET)[:3], "3 measured target shapes cannot tell 3 terms apart"),
        (
            [m.model_copy(update={"seconds": 0.5}) for m in measured("target", TARGET)],
            r"all 24 target timings are 0\.5 s, whatever the shape",
        ),
    ],
)
def test_measurements_that_say_nothing_are_refused(timings, message):
    with pytest.raises(CalibrationError, match=message):
        fit_role(timings, "target")
