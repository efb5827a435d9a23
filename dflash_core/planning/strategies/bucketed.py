"""``bucketed``: few shapes. Samples are shuffled inside buckets of like length every epoch."""

import numpy as np
from numpy.typing import NDArray

from dflash_core.bucketing import BucketingConfig, fit_bucket_edges
from dflash_core.compiled import compiled
from dflash_core.config import changed
from dflash_core.planning.batches import Batches, Samples, close_batches
from dflash_core.planning.config import BatchingConfig
from dflash_core.planning.shuffling import shuffle_segments
from dflash_core.profiling import LengthProfile

__all__ = ["bucket_edges", "plan_bucketed", "with_buckets_for"]

TABLE_LIMIT = 1 << 20
MICRO_BATCHES = 2  # full ones of a bucket, in the mean: fewer have the same members every epoch


def plan_bucketed(samples: Samples, config: BatchingConfig, rng: np.random.Generator) -> Batches:
    """Deal samples to buckets, shuffle each, and fill greedily."""
    edges = bucket_edges(samples.lengths, config)
    buckets = _buckets(samples.lengths, edges)
    groups = np.concatenate([[0], np.cumsum(np.bincount(buckets, minlength=edges.size))])
    order = _deal(buckets, groups)
    shuffle_segments(order, groups, rng)
    return close_batches(
        order, samples, config, groups=groups, edges=edges if config.pad_to == "edge" else None
    )


def bucket_edges(
    lengths: NDArray[np.int32] | LengthProfile, config: BatchingConfig
) -> NDArray[np.int64]:
    """Return the given edges, or the fitted ones when none are given."""
    if config.edges is not None:
        edges = np.array(config.edges, dtype=np.int64)
        return -(-edges // config.multiple_of) * config.multiple_of
    tokens = lengths.total_tokens if isinstance(lengths, LengthProfile) else int(lengths.sum())
    settings = BucketingConfig(
        num_buckets=with_buckets_for(tokens, config).num_buckets,
        objective=config.edge_objective,
        multiple_of=config.multiple_of,
        grid=config.edge_grid,
        token_budget=config.token_budget,
        cost=config.edge_cost,
    )
    return np.array(fit_bucket_edges(lengths, settings).edges, dtype=np.int64)


def with_buckets_for(total_tokens: int, config: BatchingConfig) -> BatchingConfig:
    """Return settings with no more buckets than an epoch of so many real tokens fills.

    Example:
        >>> with_buckets_for(500, BatchingConfig(token_budget=100)).num_buckets
        3
    """
    full = -(-total_tokens // (config.token_budget * MICRO_BATCHES))
    if config.strategy != "bucketed" or config.edges is not None or full >= config.num_buckets:
        return config
    return changed(config, {"num_buckets": full})


def _buckets(lengths: NDArray[np.int32], edges: NDArray[np.int64]) -> NDArray[np.uint8]:
    longest = int(lengths.max())
    if longest >= TABLE_LIMIT:
        return np.searchsorted(edges, lengths).astype(np.uint8)
    # Looking a short length up is several times faster than searching for it.
    return np.searchsorted(edges, np.arange(longest + 1)).astype(np.uint8)[lengths]


@compiled
def _deal(buckets, groups):
    heads = groups.copy()
    order = np.empty(buckets.size, dtype=np.int32)
    for sample in range(buckets.size):
        bucket = buckets[sample]
        order[heads[bucket]] = sample
        heads[bucket] += 1
    return order
