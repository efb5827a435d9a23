"""One policy for lengths that cannot be used, with the right value for each."""

import numpy as np
import pytest

from dflash_core.errors import DataError
from dflash_core.profiling import screen_lengths
from dflash_core.profiling.screening import ABSURD_LENGTH

BAD = [7, None, 0, -3, 2**63 - 1, 2**70, float("nan"), 50]


def test_every_bad_kind_is_counted_and_left_out():
    screened = screen_lengths(BAD, max_length=10, oversize="drop")
    assert screened.bad == {"null": 2, "zero": 1, "negative": 1, "absurd": 2, "oversize": 1}
    assert screened.lengths.tolist() == [7]
    assert screened.kept is not None
    assert screened.kept.tolist() == [0]
    assert (screened.num_dropped, screened.num_truncated) == (7, 0)


def test_truncation_shortens_what_is_too_long_and_drops_what_has_no_length():
    screened = screen_lengths(BAD, max_length=10, oversize="truncate")
    assert screened.lengths.tolist() == [7, 10]
    assert screened.select(range(8)).tolist() == [0, 7]
    assert (screened.num_dropped, screened.num_truncated) == (6, 1)


def test_good_lengths_pass_as_they_are():
    screened = screen_lengths([3, 1, 2], max_length=3)
    assert screened.kept is None
    assert screened.lengths.dtype == np.int32
    assert screened.select([5, 6, 7]).tolist() == [5, 6, 7]
    assert screen_lengths([]).lengths.size == 0


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.int32, np.uint64, np.float32, np.float64])
def test_every_number_type_means_the_same(kind):
    assert screen_lengths(np.array([3, 200, 9], dtype=kind)).lengths.tolist() == [3, 200, 9]


@pytest.mark.parametrize(
    ("lengths", "sentence"),
    [
        ([3, 0], "sample 1 has 0 tokens but a usable length is 1 to"),
        ([3, -1], "sample 1 has -1 tokens"),
        (
            [None, 3, None],
            r"sample 0 has no length .*\(2 samples are null\); set oversize to 'drop'",
        ),
        ([3.0, float("nan")], "sample 1 has no length"),
        ([3, 2**63 - 1], "sample 1 has 9,223,372,036,854,775,807 tokens"),
        ([float("inf")], "2,147,483,648 tokens"),
        ([3, 11, 12], r"sample 1 has 11 tokens but corpus.max is 10 \(2 samples are oversize\)"),
        ([ABSURD_LENGTH], "sample 0 has 2,147,483,647 tokens but a usable"),
    ],
)
def test_the_policy_error_names_the_first_bad_sample(lengths, sentence):
    with pytest.raises(DataError, match=sentence):
        screen_lengths(lengths, max_length=10, setting="corpus.max")


@pytest.mark.parametrize(
    ("lengths", "sentence"),
    [
        ([[1, 2]], "shape"),
        ([1.5, 2.0], "sample 0 has a length of 1.5; give whole numbers"),
        (["7"], "whole numbers"),
        ([None, "7"], "sample 1 has a length of '7'"),
        ([None, 2.5], "sample 1 has a length of 2.5"),
        ([True, False], "type bool"),
    ],
)
def test_what_is_no_length_is_refused_under_every_policy(lengths, sentence):
    with pytest.raises(DataError, match=sentence):
        screen_lengths(lengths, oversize="drop")
