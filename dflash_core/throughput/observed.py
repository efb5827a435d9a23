"""From the throughput of runs that were made to that of plans which were not.

With a few observed runs of known plans and no calibration, seconds can be taken as a sum of two
terms of the plan. The form is chosen beforehand: ``a * slots + c * slots * padded_length``. What
else could be said is the spread over the other forms of two terms, of which only those with
non-negative coefficients are admissible, however well the others fit.
"""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from pydantic import Field
from scipy.optimize import nnls

from dflash_core.config import FrozenModel
from dflash_core.errors import CalibrationError
from dflash_core.planning import EpochPlan

__all__ = ["MAIN_FORM", "Observation", "ObservedForm", "PlanTotals", "Projection", "fit_forms"]

MAIN_FORM = ("slots", "slot_lengths")
NEGLIGIBLE = 1e-9


class PlanTotals(FrozenModel):
    """Sums over a plan's micro-batches."""

    micro_batches: int = Field(ge=1)
    """Micro-batches."""
    tokens: int = Field(ge=1)
    """Real tokens."""
    slots: int = Field(ge=1)
    """Token slots."""
    slot_lengths: int = Field(ge=1)
    """Sum over the slots of the tokens each attends to."""

    @classmethod
    def of(cls, plan: EpochPlan) -> "PlanTotals":
        """Sum up a plan."""
        return cls(
            micro_batches=plan.num_micro_batches,
            tokens=plan.total_tokens,
            slots=int(plan.slots.sum()),
            slot_lengths=int(plan.slot_lengths.sum()),
        )


class Observation(FrozenModel):
    """A run that was made."""

    totals: PlanTotals
    """Its plan."""
    ktok_s: float = Field(gt=0)
    """Its throughput in thousand real tokens per second."""

    @property
    def seconds(self) -> float:
        """Seconds of an epoch."""
        return self.totals.tokens / self.ktok_s / 1000


class ObservedForm(FrozenModel):
    """Seconds as a sum of two terms."""

    terms: tuple[str, str]
    """Fields of `PlanTotals`."""
    coefficients: tuple[float, float]
    """Seconds per unit of each."""

    def ktok_s(self, totals: PlanTotals) -> float:
        """Return the throughput of a plan."""
        seconds = sum(
            value * getattr(totals, term)
            for term, value in zip(self.terms, self.coefficients, strict=True)
        )
        return totals.tokens / seconds / 1000


class Projection(FrozenModel):
    """All admissible forms; the first is the one that was chosen beforehand."""

    forms: tuple[ObservedForm, ...]
    """The main form, then the others."""

    def ktok_s(self, totals: PlanTotals) -> tuple[float, float, float]:
        """Return a plan's throughput: by the main form, lowest and highest over all."""
        values = [form.ktok_s(totals) for form in self.forms]
        return values[0], min(values), max(values)


def fit_forms(
    observations: Sequence[Observation], *, main: tuple[str, str] = MAIN_FORM
) -> Projection:
    """Fit every form of two terms to the observed runs.

    Args:
        observations: At least two runs whose plans differ.
        main: The form that counts.

    Raises:
        CalibrationError: Too few runs, or the main form needs a negative coefficient.
    """
    if len(observations) < 2:
        raise CalibrationError(
            f"{len(observations)} observed runs cannot fix two terms; give at least 2"
        )
    forms = {terms: _fit(observations, terms) for terms in combinations(PlanTotals.model_fields, 2)}
    chosen = forms.pop(main)
    if chosen is None:
        raise CalibrationError(
            f"seconds as {main[0]} and {main[1]} would need a negative coefficient for these "
            "observed runs; look for an error in their throughput or their plans"
        )
    return Projection(forms=(chosen, *(form for form in forms.values() if form is not None)))


def _fit(observations: Sequence[Observation], terms: tuple[str, str]) -> ObservedForm | None:
    seconds = np.array([observation.seconds for observation in observations])
    columns = np.array([[float(getattr(o.totals, term)) for term in terms] for o in observations])
    scaled = columns / seconds[:, None]
    size = scaled.max(axis=0)
    free, *_ = np.linalg.lstsq(scaled / size, np.ones(len(seconds)), rcond=None)
    # Two terms that are all but proportional over these runs fix nothing.
    if np.linalg.cond(scaled / size) > 1 / NEGLIGIBLE or (free < -NEGLIGIBLE).any():
        return None
    values, _ = nnls(scaled / size, np.ones(len(seconds)))
    first, second = (values / size).tolist()
    return ObservedForm(terms=terms, coefficients=(first, second))
