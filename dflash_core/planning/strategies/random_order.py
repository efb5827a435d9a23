"""``random``: the diversity ceiling. A full shuffle, padded to each micro-batch's longest."""

import numpy as np

from dflash_core.planning.batches import Batches, Samples, close_batches
from dflash_core.planning.config import BatchingConfig
from dflash_core.planning.shuffling import shuffled

__all__ = ["plan_random"]


def plan_random(samples: Samples, config: BatchingConfig, rng: np.random.Generator) -> Batches:
    """Shuffle everything and fill greedily."""
    return close_batches(shuffled(samples.lengths.size, rng), samples, config)
