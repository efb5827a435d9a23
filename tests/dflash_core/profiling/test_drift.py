"""Drift is the largest gap between two distributions, whatever the numbers of samples."""

import pytest

from dflash_core.profiling import LengthProfile, length_drift


@pytest.mark.parametrize(
    ("before", "after", "drift"),
    [([3, 5], [3, 3, 5, 5], 0), ([3, 5], [6, 7], 1), ([1, 2, 3, 4], [1, 2, 3, 9], 0.25)],
)
def test_drift_is_the_largest_difference_of_the_cumulative_shares(before, after, drift):
    profiles = [LengthProfile.from_lengths(lengths) for lengths in (before, after)]
    assert length_drift(*profiles) == length_drift(*reversed(profiles)) == drift
