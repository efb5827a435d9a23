"""Have the lengths changed since the edges were fitted?"""

import numpy as np

from dflash_core.profiling.profile import LengthProfile

__all__ = ["length_drift"]


def length_drift(before: LengthProfile, after: LengthProfile) -> float:
    """Return the largest difference of two cumulative length distributions, in [0, 1].

    The Kolmogorov-Smirnov distance: 0 for equal shapes, whatever the numbers of samples.

    Args:
        before: Profile of the last fit.
        after: Profile of now.

    Example:
        >>> short, long = (LengthProfile.from_lengths([n, n + 1]) for n in (10, 11))
        >>> length_drift(short, short), length_drift(short, long)
        (0.0, 0.5)
    """
    grid = np.union1d(before.lengths, after.lengths)
    shares = [_cumulative(profile, grid) for profile in (before, after)]
    return float(np.abs(shares[0] - shares[1]).max())


def _cumulative(profile: LengthProfile, grid: "np.ndarray") -> "np.ndarray":
    counts = np.concatenate([[0], np.cumsum(profile.counts)])
    return counts[np.searchsorted(profile.lengths, grid, side="right")] / counts[-1]
