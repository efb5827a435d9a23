"""Is one drafter better than another on the same prompts? A paired bootstrap."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dflash_core.config import FrozenModel
from dflash_core.decoding.report import AcceptanceReport
from dflash_core.errors import DataError

__all__ = ["LEAST_BATCHES", "Gain", "Measure", "compare_drafters"]

NUM_RESAMPLES = 10_000
LEAST_BATCHES = 2  # of a single one every resample is the same

Measure = Literal["tau", "speedup"]


class Gain(FrozenModel):
    """Difference of what two drafters measure, challenger minus champion."""

    measure: Measure
    """What was measured: acceptance length, or speed-up of whole requests."""
    challenger: float
    """The challenger's."""
    champion: float
    """The champion's."""
    gain: float
    """Their difference."""
    low: float
    """Lower end of its interval."""
    high: float
    """Upper end of its interval."""
    confidence: float
    """Mass of the interval."""

    def is_better_by(self, margin: float) -> bool:
        """Say whether the gain is over a margin with the interval's confidence."""
        return self.low > margin


def compare_drafters(
    challenger: AcceptanceReport,
    champion: AcceptanceReport,
    *,
    measure: Measure = "tau",
    confidence: float = 0.95,
    seed: int = 0,
) -> Gain:
    """Resample what was measured, alike for both drafters, and take the difference's spread.

    Acceptance is resampled prompt by prompt. Time is measured batch by batch, so speed-up is
    resampled by the batches of the first batch size. Each drafter's time is held against plain
    decoding of the same batch in the same run: what two runs share is the requests, not the
    machine's pace. Efron and Tibshirani, An Introduction to the Bootstrap (1993), percentile
    interval.

    Args:
        challenger: Report of the new drafter.
        champion: Report of the one in service, on the same prompts in the same order.
        measure: What is compared.
        confidence: Mass of the two-sided interval.
        seed: Seed of resampling.

    Raises:
        DataError: The reports are of different prompts, or time was taken of too few batches.
    """
    new, old = (_counts(report, measure) for report in (challenger, champion))
    if new.shape != old.shape or new.size == 0:
        raise DataError(
            f"{measure} on {len(new)} {'prompts' if measure == 'tau' else 'batches'} cannot be "
            f"compared with {measure} on {len(old)}; evaluate both drafters on the same prompts"
        )
    if measure == "speedup" and len(new) < LEAST_BATCHES:
        raise DataError(
            f"speed-up was timed in {len(new)} full batch of {challenger.batch_size} prompts, and "
            f"an interval takes {LEAST_BATCHES}; let evaluation.batch_sizes begin with a smaller "
            "one, or hold out more prompts"
        )
    rng = np.random.default_rng(seed)
    picks = rng.integers(len(new), size=(NUM_RESAMPLES, len(new)))
    differences = _ratio(new[picks]) - _ratio(old[picks])
    tail = (1 - confidence) / 2
    low, high = np.quantile(differences, [tail, 1 - tail])
    ours, theirs = float(_ratio(new)), float(_ratio(old))
    return Gain(
        measure=measure,
        challenger=ours,
        champion=theirs,
        gain=ours - theirs,
        low=float(low),
        high=float(high),
        confidence=confidence,
    )


def _counts(report: AcceptanceReport, measure: Measure) -> NDArray[np.float64]:
    """Return numerators and denominators, shape (units, pairs, 2), whose ratios are multiplied."""
    if measure == "tau":
        return np.array(report.per_prompt, dtype=np.float64).reshape(-1, 1, 2)
    batches = zip(report.speculative_batches, report.plain_batches, strict=True)
    rows = [
        [(drafted.num_tokens, drafted.seconds), (plain.seconds, plain.num_tokens)]
        for drafted, plain in batches
    ]
    return np.array(rows, dtype=np.float64).reshape(-1, 2, 2)


def _ratio(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return pooled ratios; a resample without a verification counts as 1."""
    above, below = np.moveaxis(counts.sum(-3), -1, 0)
    return np.where(below > 0, above / np.maximum(below, 1e-12), 1.0).prod(-1)
