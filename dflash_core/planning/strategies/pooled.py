"""``pooled``: shuffle, cut into pools, sort inside each pool.

The padding of ``sorted``, nearly, with a fresh composition every epoch: who can meet whom is
drawn anew with the pools. Pools run up and down by turns, so that none leaves a partial
micro-batch behind.
"""

import numpy as np

from dflash_core.planning.batches import Batches, Samples, close_batches
from dflash_core.planning.config import BatchingConfig
from dflash_core.planning.shuffling import shuffled, sort_pools

__all__ = ["plan_pooled"]


def plan_pooled(samples: Samples, config: BatchingConfig, rng: np.random.Generator) -> Batches:
    """Shuffle, sort inside pools of ``pool_size`` samples, and fill greedily."""
    order = shuffled(samples.lengths.size, rng)
    ordered = samples.lengths[order]
    sort_pools(order, ordered, config.pool_size)
    return close_batches(order, samples, config, lengths=ordered)
