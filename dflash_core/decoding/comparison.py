"""Is one drafter better than another on the same prompts? A paired bootstrap over prompts."""

import numpy as np

from dflash_core.config import FrozenModel
from dflash_core.decoding.acceptance import AcceptanceReport
from dflash_core.errors import DataError

__all__ = ["AcceptanceGain", "compare_acceptance"]

NUM_RESAMPLES = 10_000


class AcceptanceGain(FrozenModel):
    """Difference of pooled acceptance lengths, challenger minus champion."""

    challenger_tau: float
    """The challenger's acceptance length."""
    champion_tau: float
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


def compare_acceptance(
    challenger: AcceptanceReport,
    champion: AcceptanceReport,
    *,
    confidence: float = 0.95,
    seed: int = 0,
) -> AcceptanceGain:
    """Resample prompts, the same for both drafters, and take the spread of the difference.

    Efron and Tibshirani, An Introduction to the Bootstrap (1993), percentile interval.

    Args:
        challenger: Report of the new drafter.
        champion: Report of the one in service, on the same prompts in the same order.
        confidence: Mass of the two-sided interval.
        seed: Seed of resampling.

    Raises:
        DataError: The reports are of different prompts.
    """
    new, old = (np.array(report.per_prompt, dtype=np.int64) for report in (challenger, champion))
    if new.shape != old.shape or new.size == 0:
        raise DataError(
            f"acceptance on {len(new)} prompts cannot be compared with acceptance on {len(old)}; "
            "evaluate both drafters on the same prompts"
        )
    rng = np.random.default_rng(seed)
    picks = rng.integers(len(new), size=(NUM_RESAMPLES, len(new)))
    differences = _tau(new[picks]) - _tau(old[picks])
    tail = (1 - confidence) / 2
    low, high = np.quantile(differences, [tail, 1 - tail])
    return AcceptanceGain(
        challenger_tau=challenger.tau,
        champion_tau=champion.tau,
        gain=challenger.tau - champion.tau,
        low=float(low),
        high=float(high),
        confidence=confidence,
    )


def _tau(counts: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]") -> "np.ndarray":
    """Return pooled acceptance lengths; a resample without a verification counts as 1."""
    tokens, rounds = counts[..., 0].sum(-1), counts[..., 1].sum(-1)
    return np.where(rounds > 0, tokens / np.maximum(rounds, 1), 1.0)
