"""The profile is exact, merges exactly, and survives a round trip through JSON."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dflash_core.errors import DataError
from dflash_core.profiling import (
    DomainHistogram,
    LengthProfile,
    find_spike,
    profile_of_counts,
)

QUICK = settings(max_examples=60)
lengths_and_cut = st.lists(st.integers(-1, 30), max_size=40).flatmap(
    lambda lengths: st.tuples(st.just(lengths), st.integers(0, len(lengths)))
)


def profile_of(lengths, **settings) -> LengthProfile:
    return LengthProfile.from_lengths(np.array(lengths, dtype=np.int64), **settings)


@QUICK
@given(lengths_and_cut, st.sampled_from(["truncate", "drop"]))
def test_merged_shards_equal_the_profile_of_everything(case, oversize):
    lengths, cut = case
    settings = {"max_length": 20, "oversize": oversize}
    whole = profile_of(lengths, **settings)
    parts = profile_of(lengths[:cut], **settings).merge(profile_of(lengths[cut:], **settings))
    assert parts == whole
    assert LengthProfile.from_json(whole.to_json()) == whole


@QUICK
@given(st.lists(st.integers(-1, 30), min_size=1), st.sampled_from(["truncate", "drop"]))
def test_a_table_of_counts_gives_what_the_samples_give(lengths, oversize):
    table = Counter(lengths)
    counted = profile_of_counts(
        list(table), list(table.values()), [0] * len(table), max_length=20, oversize=oversize
    )
    assert counted == profile_of(lengths, max_length=20, oversize=oversize)


@QUICK
@given(st.lists(st.integers(1, 50), min_size=1), st.floats(0, 1))
def test_a_quantile_is_the_smallest_length_that_reaches_the_share(lengths, q):
    own = profile_of(lengths).quantile(q)
    reached = [n for n in sorted(lengths) if sum(x <= n for x in lengths) >= q * len(lengths)]
    assert own == reached[0]


def test_totals_are_64_bit_sums_per_domain():
    lengths = np.full(902_087, 8191)
    profile = LengthProfile.from_lengths(lengths, lengths)
    assert profile.total_tokens == profile.total_supervised == 902_087 * 8191
    profile = LengthProfile.from_lengths([4, 6, 6], [9, 1, 2], ["b", "a", "b"])
    assert list(profile.domains) == ["a", "b"]
    assert profile.total_supervised == 4 + 1 + 2  # no sample has more supervised than real tokens
    assert profile.of_domain("b").counts.tolist() == [1, 1]
    assert profile.summary()["domains"]["a"]["max"] == 6


def test_a_pile_at_the_maximum_is_a_truncation_spike():
    tail = np.random.default_rng(0).integers(1, 1000, 5000)
    spike = profile_of([*tail, *[1000] * 400]).truncation_spike
    assert spike is not None
    assert (spike.length, spike.count) == (1000, 400)
    assert profile_of(tail).truncation_spike is None
    assert profile_of([8] * 10).truncation_spike is None
    assert find_spike(np.array([1, 2]), np.array([999, 1])) is None
    assert profile_of([3, 9]).truncation_spike is None


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(DataError, match="max_length 5 and None do not merge"):
        profile_of([1], max_length=5).merge(profile_of([1]))
    with pytest.raises(DataError, match="supervised has 2 entries for 1 lengths"):
        LengthProfile.from_lengths([1], [1, 2])
    with pytest.raises(DataError, match="domains has 2 entries for 1 lengths"):
        LengthProfile.from_lengths([1], domains=["a", "b"])
    with pytest.raises(DataError, match=r"quantile 1\.5 is outside"):
        profile_of([1]).quantile(1.5)
    with pytest.raises(DataError, match="empty profile has no quantiles"):
        profile_of([]).quantile(0.5)
    assert profile_of([]).summary()["mean"] is None


@pytest.mark.parametrize(
    ("lengths", "counts"), [((1, 2), (1,)), ((2, 1), (1, 1)), ((1, 2), (1, 0)), ((0, 2), (1, 1))]
)
def test_a_damaged_histogram_is_refused(lengths, counts):
    with pytest.raises(ValidationError):
        DomainHistogram(lengths=lengths, counts=counts)
