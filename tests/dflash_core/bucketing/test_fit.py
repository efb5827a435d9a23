"""Fits against exhaustive search over every edge set."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.bucketing import (
    BucketingConfig,
    ShapeCost,
    fit_bucket_edges,
    fit_buckets,
    histogram_of,
)
from dflash_core.errors import ConfigError, DataError
from dflash_core.profiling import LengthProfile

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)
QUICK = settings(max_examples=60)


def slots(edges, lengths):
    return sum(min(edge for edge in edges if edge >= length) for length in lengths)


def price(edges, lengths, cost, budget):
    """Cost of padding to the edge, one bucket after the other."""
    total, last = 0.0, 0
    for edge in edges:
        count = sum(last < length <= edge for length in lengths)
        rows = budget // edge
        total += count * (cost.per_slot * edge + cost.per_slot_length * edge**2)
        total += cost.per_micro_batch * -(-count // rows)
        last = edge
    return total


def expected_slots(edges, lengths, budget):
    """Expected maximum of as many independent draws as rows fit, from the definition."""
    total, last = 0.0, 0
    for edge in edges:
        members = [length for length in lengths if last < length <= edge]
        draws = min(budget // edge, len(members))
        previous, mean = 0.0, 0.0
        for length in sorted(set(members)):
            share = (sum(other <= length for other in members) / len(members)) ** draws
            mean += length * (share - previous)
            previous = share
        total += len(members) * mean
        last = edge
    return total


def every_edge_set(lengths, num_buckets):
    """Edge sets that hold all lengths; an edge off the lengths is never better than one on."""
    *lower, top = sorted(set(lengths))
    for size in range(min(num_buckets, len(lower) + 1)):
        for chosen in combinations(lower, size):
            yield (*chosen, top)


@QUICK
@given(LENGTHS, st.integers(1, 4))
def test_fit_matches_exhaustive_search(lengths, num_buckets):
    edges = fit_buckets(lengths, num_buckets=num_buckets)
    best = min(slots(chosen, lengths) for chosen in every_edge_set(lengths, num_buckets))
    assert slots(edges, lengths) == best
    assert len(edges) == min(num_buckets, len(set(lengths)))


@QUICK
@given(LENGTHS, st.integers(1, 4), st.sampled_from([4, 8]))
def test_edges_on_a_multiple_are_the_best_of_that_grid(lengths, num_buckets, multiple):
    edges = fit_buckets(lengths, num_buckets=num_buckets, multiple_of=multiple)
    assert all(edge % multiple == 0 for edge in edges)
    rounded = [-(-length // multiple) * multiple for length in lengths]
    best = min(slots(chosen, rounded) for chosen in every_edge_set(rounded, num_buckets))
    assert slots(edges, lengths) == best


@QUICK
@given(LENGTHS, st.integers(1, 4), st.integers(40, 100), st.floats(0, 100))
def test_fit_to_cost_matches_exhaustive_search(lengths, num_buckets, budget, constant):
    cost = ShapeCost(per_micro_batch=constant, per_slot=1.0, per_slot_length=0.1)
    config = BucketingConfig(
        num_buckets=num_buckets,
        objective="cost",
        token_budget=budget,
        cost=cost,
        isolate_spike=False,
    )
    fit = fit_bucket_edges(lengths, config)
    best = min(
        price(edges, lengths, cost, budget) for edges in every_edge_set(lengths, num_buckets)
    )
    # Float64 sums of at most 30 terms below 1e6: equal to far more digits than 9.
    assert fit.optimum == pytest.approx(best, rel=1e-9)
    assert price(fit.edges, lengths, cost, budget) == pytest.approx(best, rel=1e-9)
    assert fit.gap == 0


@QUICK
@given(LENGTHS, st.integers(1, 4), st.integers(40, 200))
def test_fit_to_the_batch_maximum_matches_exhaustive_search(lengths, num_buckets, budget):
    config = BucketingConfig(
        num_buckets=num_buckets, objective="batch_maximum", token_budget=budget, isolate_spike=False
    )
    fit = fit_bucket_edges(lengths, config)
    best = min(
        expected_slots(edges, lengths, budget) for edges in every_edge_set(lengths, num_buckets)
    )
    # The fit stops summing where a probability falls below 1e-7.
    assert fit.optimum == pytest.approx(best, rel=1e-6)


@QUICK
@given(LENGTHS, st.integers(1, 4), st.integers(40, 120), st.sampled_from([1, 8]))
def test_harmonic_edges_use_the_budget_up(lengths, num_buckets, budget, multiple):
    config = BucketingConfig(
        num_buckets=num_buckets,
        grid="harmonic",
        token_budget=budget,
        multiple_of=multiple,
        isolate_spike=False,
    )
    for edge in fit_bucket_edges(lengths, config).edges:
        rows = budget // edge
        assert edge % multiple == 0
        assert edge + multiple > budget / rows


def test_the_gap_of_thinned_candidates_bounds_the_true_optimum():
    lengths = np.random.default_rng(0).integers(1, 60, 300)
    limits = {"num_buckets": 4, "objective": "cost", "token_budget": 200, "isolate_spike": False}
    exact = fit_bucket_edges(lengths, BucketingConfig(**limits))
    thinned = fit_bucket_edges(lengths, BucketingConfig(**limits, max_candidates=12))
    assert exact.gap == 0
    assert thinned.num_candidates == 12
    assert thinned.gap > 0
    assert exact.optimum <= thinned.optimum <= exact.optimum * (1 + thinned.gap)


def test_a_truncation_spike_gets_an_edge_of_its_own():
    lengths = [*range(1, 91), *([100] * 60)]
    fit = fit_bucket_edges(lengths, BucketingConfig(num_buckets=2))
    assert fit.edges == (90, 100)
    assert fit.isolated_length == 100
    free = fit_bucket_edges(lengths, BucketingConfig(num_buckets=2, isolate_spike=False))
    assert fit.optimum == pytest.approx(free.optimum * (1 + fit.gap), rel=1e-12)
    assert free.isolated_length is None


def test_a_grid_that_cannot_tell_the_spike_apart_leaves_it_with_its_neighbours():
    lengths = [*range(1, 91), *([96] * 60)]
    fit = fit_bucket_edges(lengths, BucketingConfig(num_buckets=2, multiple_of=32))
    assert fit.edges[-1] == 96


@pytest.mark.parametrize("objective", ["slots", "cost", "batch_maximum"])
def test_the_curve_holds_the_optimum_of_every_number_of_buckets(objective):
    lengths = np.random.default_rng(1).integers(1, 60, 200)
    limits = {"objective": objective, "token_budget": 300, "isolate_spike": False}
    fit = fit_bucket_edges(lengths, BucketingConfig(num_buckets=5, **limits))
    for number, value in enumerate(fit.curve, start=1):
        smaller = fit_bucket_edges(lengths, BucketingConfig(num_buckets=number, **limits))
        assert smaller.optimum == pytest.approx(min(fit.curve[:number]), rel=1e-12)
        assert value >= fit.optimum


def test_more_buckets_than_lengths_are_not_invented():
    fit = fit_bucket_edges([7, 7, 7], BucketingConfig(num_buckets=128))
    assert fit.edges == (7,)
    assert fit.padding_efficiency == 1
    assert fit.efficiency_curve(21) == (1.0,)


def test_a_fit_reads_a_profile_as_it_reads_lengths():
    lengths = np.random.default_rng(2).integers(1, 500, 300)
    profile = LengthProfile.from_lengths(lengths)
    assert (
        fit_buckets(profile, num_buckets=5).tolist() == fit_buckets(lengths, num_buckets=5).tolist()
    )


def test_sums_beyond_32_bits_are_exact():
    histogram = histogram_of([8191])
    wide = type(histogram)(np.array([1, 8191]), np.array([900_000, 902_087]))
    fit = fit_bucket_edges(wide, BucketingConfig(num_buckets=1))
    assert fit.optimum == (900_000 + 902_087) * 8191


def test_lengths_beyond_the_table_are_counted_too():
    assert fit_buckets([3, 10_000_000, 9_999_999], num_buckets=2).tolist() == [3, 10_000_000]


@pytest.mark.parametrize(
    ("lengths", "changes", "words"),
    [
        ([], {}, "no lengths"),
        ([0], {}, "0 tokens"),
        ([50], {"objective": "cost"}, "token_budget"),
        ([50], {"objective": "cost", "token_budget": 40}, "50 slots but token_budget is 40"),
        ([50], {"grid": "harmonic", "token_budget": 60, "multiple_of": 64}, "64 slots"),
    ],
)
def test_what_cannot_be_fitted_is_refused_in_words(lengths, changes, words):
    with pytest.raises((ConfigError, DataError), match=words):
        fit_bucket_edges(lengths, BucketingConfig(**changes))


def test_counts_below_one_are_refused():
    with pytest.raises(ConfigError, match="num_buckets is 0"):
        fit_buckets([1], num_buckets=0)
    with pytest.raises(ConfigError, match="multiple_of is 0"):
        fit_buckets([1], num_buckets=1, multiple_of=0)


def test_a_fit_for_cost_has_no_efficiency_curve():
    fit = fit_bucket_edges([5, 6], BucketingConfig(objective="cost", token_budget=12))
    with pytest.raises(ConfigError, match="objective"):
        fit.efficiency_curve(11)
