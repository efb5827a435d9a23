"""``bucketed``: few shapes. Samples are shuffled inside buckets of like length every epoch."""

import numpy as np
from numpy.typing import NDArray

from dflash_core.bucketing import BucketingConfig, fit_bucket_edges
from dflash_core.compiled import compiled
from dflash_core.planning.batches import Batches, Samples, close_batches
from dflash_core.planning.config import BatchingConfig
from dflash_core.planning.shuffling import shuffle_segments

__all__ = ["bucket_edges", "plan_bucketed"]


def plan_bucketed(samples: Samples, config: BatchingConfig, rng: np.random.Generator) -> Batches:
    """Deal samples to buckets, shuffle each, and fill greedily."""
    edges = bucket_edges(samples.lengths, config)
    table = _bucket_table(edges, int(samples.lengths.max()))
    order, groups = _split(samples.lengths, edges, table)
    shuffle_segments(order, groups, rng)
    return close_batches(
        order, samples, config, groups=groups, edges=edges if config.pad_to == "edge" else None
    )


def bucket_edges(lengths: NDArray[np.int32], config: BatchingConfig) -> NDArray[np.int64]:
    """Return the given edges, or the fitted ones when none are given."""
    if config.edges is not None:
        edges = np.array(config.edges, dtype=np.int64)
        return -(-edges // config.multiple_of) * config.multiple_of
    settings = BucketingConfig(
        num_buckets=config.num_buckets,
        objective=config.edge_objective,
        multiple_of=config.multiple_of,
        grid=config.edge_grid,
        token_budget=config.token_budget,
        cost=config.edge_cost,
    )
    return np.array(fit_bucket_edges(lengths, settings).edges, dtype=np.int64)


def _bucket_table(edges: NDArray[np.int64], longest: int) -> NDArray[np.uint8]:
    # Looking a short length up is several times faster than searching for it.
    if longest >= 1 << 20:
        return np.empty(0, dtype=np.uint8)
    return np.searchsorted(edges, np.arange(longest + 1)).astype(np.uint8)


@compiled
def _split(lengths, edges, table):
    groups = np.zeros(edges.size + 1, dtype=np.int64)
    for sample in range(lengths.size):
        if table.size:
            groups[table[lengths[sample]] + 1] += 1
        else:
            groups[np.searchsorted(edges, lengths[sample]) + 1] += 1
    for bucket in range(edges.size):
        groups[bucket + 1] += groups[bucket]
    heads = groups.copy()
    order = np.empty(lengths.size, dtype=np.int32)
    for sample in range(lengths.size):
        if table.size:
            bucket = np.int64(table[lengths[sample]])
        else:
            bucket = np.int64(np.searchsorted(edges, lengths[sample]))
        order[heads[bucket]] = sample
        heads[bucket] += 1
    return order, groups
