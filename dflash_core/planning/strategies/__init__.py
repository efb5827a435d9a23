"""How samples become micro-batches: one file and one line here per strategy."""

from collections.abc import Callable

import numpy as np

from dflash_core.planning.batches import Batches, Samples
from dflash_core.planning.config import BatchingConfig
from dflash_core.planning.strategies.bucketed import plan_bucketed
from dflash_core.planning.strategies.packed import plan_packed
from dflash_core.planning.strategies.pooled import plan_pooled
from dflash_core.planning.strategies.random_order import plan_random
from dflash_core.planning.strategies.sorted_order import plan_sorted

__all__ = ["STRATEGIES", "Strategy"]

Strategy = Callable[[Samples, BatchingConfig, np.random.Generator], Batches]

STRATEGIES: dict[str, Strategy] = {
    "sorted": plan_sorted,
    "random": plan_random,
    "bucketed": plan_bucketed,
    "pooled": plan_pooled,
    "packed": plan_packed,
}
