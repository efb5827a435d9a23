import pytest

from dflash_core.errors import CalibrationError
from dflash_core.throughput import Observation, PlanTotals, fit_forms
from tests.dflash_core.throughput.machines import plan


def totals(micro_batches=10, tokens=1000, slots=1200, slot_lengths=300_000) -> PlanTotals:
    return PlanTotals(
        micro_batches=micro_batches, tokens=tokens, slots=slots, slot_lengths=slot_lengths
    )


def observed(form, plan_totals):
    seconds = form[0] * plan_totals.slots + form[1] * plan_totals.slot_lengths
    return Observation(totals=plan_totals, ktok_s=plan_totals.tokens / seconds / 1000)


NEAT = totals(slots=1000, slot_lengths=250_000)
LOOSE = totals(micro_batches=25, slots=2100, slot_lengths=900_000)
MIDDLE = totals(micro_batches=12, slots=1200, slot_lengths=400_000)


def test_two_runs_give_back_the_terms_and_project_a_third():
    truth = (2e-5, 3e-8)
    found = fit_forms([observed(truth, NEAT), observed(truth, LOOSE)])
    assert found.forms[0].terms == ("slots", "slot_lengths")
    assert found.forms[0].coefficients == pytest.approx(truth)
    best, low, high = found.ktok_s(MIDDLE)
    assert best == pytest.approx(observed(truth, MIDDLE).ktok_s)
    assert low <= best <= high


def test_other_forms_count_only_with_non_negative_terms():
    found = fit_forms([observed((2e-5, 3e-8), NEAT), observed((2e-5, 3e-8), LOOSE)])
    assert all(min(form.coefficients) >= 0 for form in found.forms)
    # Slots alone grow less than the time, so slots with micro-batches would have to be fewer.
    assert ("tokens", "slot_lengths") in {form.terms for form in found.forms}


def test_a_main_form_with_a_negative_term_is_refused():
    # The time grows less than the slots do, and squared length grows more.
    fast = Observation(totals=NEAT, ktok_s=1.0)
    slower = Observation(totals=LOOSE, ktok_s=0.9)
    with pytest.raises(CalibrationError, match="slots and slot_lengths would need a negative"):
        fit_forms([fast, slower])


def test_one_run_or_twice_the_same_fixes_nothing():
    one = Observation(totals=NEAT, ktok_s=1.0)
    with pytest.raises(CalibrationError, match="1 observed runs cannot fix two terms"):
        fit_forms([one])
    with pytest.raises(CalibrationError, match="negative coefficient"):
        fit_forms([one, one])


def test_totals_are_sums_over_the_plan():
    found = plan(strategy="random")
    sums = PlanTotals.of(found)
    assert sums.tokens == found.identity.lengths.sum()
    assert sums.slots == (found.rows * found.padded_lengths).sum()
    assert sums.slot_lengths == (found.rows * found.padded_lengths**2).sum()
