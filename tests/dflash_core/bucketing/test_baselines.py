"""Edges that others use."""

import numpy as np
import pytest

from dflash_core.bucketing import edge_efficiency, fit_buckets, quantile_edges, token_mass_edges
from dflash_core.errors import ConfigError


def test_quantile_edges_hold_equal_counts():
    lengths = np.arange(1, 101)
    assert quantile_edges(lengths, num_buckets=4).tolist() == [25, 50, 75, 100]


def test_token_mass_edges_hold_equal_tokens():
    lengths = np.arange(1, 1001)
    edges = token_mass_edges(lengths, num_buckets=4)
    bucket = np.searchsorted(edges, lengths)
    mass = np.bincount(bucket, weights=lengths)
    assert np.ptp(mass) / mass.mean() < 0.01  # one sample more or less at each edge


def test_edges_that_coincide_are_merged():
    assert quantile_edges([5, 5, 5, 9], num_buckets=4).tolist() == [5, 9]


def test_no_baseline_beats_the_fit():
    lengths = np.random.default_rng(0).lognormal(5, 1, 2_000).astype(int) + 1
    fitted = edge_efficiency(lengths, fit_buckets(lengths, num_buckets=6))
    for baseline in (quantile_edges, token_mass_edges):
        assert edge_efficiency(lengths, baseline(lengths, num_buckets=6)) <= fitted


def test_efficiency_counts_real_tokens_over_slots():
    assert edge_efficiency([2, 4, 8], [4, 8]) == 14 / 16


def test_edges_below_the_longest_sample_are_refused():
    with pytest.raises(ConfigError, match="10 tokens but the last edge is 8"):
        edge_efficiency([10], [8])
    with pytest.raises(ConfigError, match="last edge is 0"):
        edge_efficiency([10], [])
    with pytest.raises(ConfigError, match="num_buckets is 0"):
        quantile_edges([1], num_buckets=0)
