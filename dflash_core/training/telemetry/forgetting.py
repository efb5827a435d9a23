"""Does the model get worse at some lengths while it gets better at the rest?

The same held-out samples with the same anchors are measured again and again, so differences are
taken sample by sample, which removes the spread between samples. A length group is *forgotten* when
its mean difference is above zero beyond its own noise (a one-sided t test) while the mean
difference of all other samples is below zero. Both the last measurement and one further back are
looked at, so that slow loss is seen too. The level of a test is ``false_alarm_rate`` divided by the
number of tests, so a measurement without any change raises an alarm with at most that chance.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats

__all__ = ["LAGS", "forgotten_groups"]

LAGS = (1, 4)
LEAST_SAMPLES = 4


def forgotten_groups(
    history: Sequence[NDArray[np.float64]],
    groups: NDArray[np.int64],
    *,
    false_alarm_rate: float,
) -> list[int]:
    """Return the length groups that the newest measurement finds forgotten.

    Args:
        history: Loss of each held-out sample at each measurement, oldest first, each of shape
            ``(num_samples,)``; not a number where a sample has no loss.
        groups: Length group of each sample, same shape.
        false_alarm_rate: Chance of an alarm where nothing changed.
    """
    names = np.unique(groups)
    lags = [lag for lag in LAGS if lag < len(history)]
    if not lags or len(names) < 2:
        return []
    level = false_alarm_rate / (len(names) * len(lags))
    found: set[int] = set()
    for lag in lags:
        difference = history[-1] - history[-1 - lag]
        usable = np.isfinite(difference)
        for name in names.tolist():
            inside = difference[usable & (groups == name)]
            outside = difference[usable & (groups != name)]
            if len(inside) < LEAST_SAMPLES or not len(outside) or outside.mean() >= 0:
                continue
            error = inside.std(ddof=1) / np.sqrt(len(inside))
            limit = stats.t.isf(level, len(inside) - 1) * error
            if inside.mean() > max(float(limit), 0.0):
                found.add(int(name))
    return sorted(found)
