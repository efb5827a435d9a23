"""What a plan refuses, before and after samples are grouped: one sentence for each."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dflash_core.errors import ConfigError, DataError, PlanError
from dflash_core.planning.config import BatchingConfig
from dflash_core.planning.cost import PlanCost
from dflash_core.profiling import Screened

__all__ = [
    "budgeted_anchors",
    "check_places",
    "check_population",
    "check_sums",
    "longest_allowed",
    "usable_supervised",
]


def longest_allowed(config: BatchingConfig) -> tuple[int, str]:
    """Return the longest sample that fits the budgets and edges, and the setting that says so."""
    whole = config.token_budget // config.multiple_of * config.multiple_of
    if not whole:
        raise ConfigError(
            f"batching.multiple_of {config.multiple_of:,} exceeds batching.token_budget "
            f"{config.token_budget:,}; raise the budget"
        )
    limit, setting = whole, "batching.token_budget"
    if config.max_length is not None and config.max_length < limit:
        limit, setting = config.max_length, "batching.max_length"
    if config.strategy == "bucketed" and config.edges is not None:
        last = -(-config.edges[-1] // config.multiple_of) * config.multiple_of
        if config.pad_to == "edge" and last > whole:
            raise ConfigError(
                f"a row of the last edge has {last:,} slots but batching.token_budget is "
                f"{config.token_budget:,}; raise the budget or lower batching.edges"
            )
        if last < limit:
            limit, setting = last, "the last of batching.edges"
    return limit, setting


def check_population(
    screened: Screened, config: BatchingConfig, world_size: int, limit: int
) -> None:
    """Refuse an epoch without samples, with too many, or with ranks that always idle."""
    count = screened.lengths.size
    if count + screened.num_dropped >= 2**31 - 1:
        raise PlanError(f"{count:,} samples exceed 2,147,483,646; plan them in parts")
    if not count:
        lost = f" after {screened.num_dropped:,} were dropped" if screened.num_dropped else ""
        raise PlanError(
            f"there are no samples to plan{lost}; give samples of 1 to {limit:,} tokens or raise "
            "batching.token_budget"
        )
    if config.tail == "drop" and count < world_size:
        raise PlanError(
            f"{count} samples leave some of {world_size} ranks idle in every step; lower the "
            "number of ranks or set batching.tail to 'partial' or 'repeat'"
        )


def check_places(num_steps: int, world_size: int, config: BatchingConfig) -> None:
    """Refuse a layout that is nearly all idle slots, and too large for memory."""
    slots = -(-config.micro_batches_per_step // world_size) * world_size
    if num_steps * slots >= 2**31:
        raise PlanError(
            f"{num_steps:,} steps of {slots:,} slots on {world_size:,} ranks exceed 2,147,483,647 "
            "places; lower the number of ranks or batching.micro_batches_per_step"
        )


def usable_supervised(supervised: ArrayLike | None, screened: Screened) -> NDArray[np.int64] | None:
    """Return the supervised tokens of the kept samples, cut to their lengths."""
    if supervised is None:
        return None
    values = np.asarray(supervised)
    expected = screened.lengths.size + screened.num_dropped
    if values.shape != (expected,) or values.dtype.kind not in "iu":
        raise DataError(
            f"supervised tokens have shape {values.shape} and type {values.dtype}; give "
            f"{expected:,} whole numbers, one per sample"
        )
    if values.size and int(values.min()) < 0:
        index = int(np.argmin(values))
        raise DataError(f"sample {index} has {values[index]} supervised tokens; give at least 0")
    return np.minimum(screened.select(values), screened.lengths)


def budgeted_anchors(
    anchors: NDArray[np.int32] | None, config: BatchingConfig
) -> NDArray[np.int32]:
    """Return the anchors that count against the budget; empty when there is none."""
    if config.anchor_budget is None:
        return np.empty(0, dtype=np.int32)
    if anchors is None:
        raise ConfigError(
            f"batching.anchor_budget {config.anchor_budget:,} needs the supervised tokens of each "
            "sample; give supervised or leave the budget unset"
        )
    most = int(anchors.max())
    if most > config.anchor_budget:
        raise PlanError(
            f"a sample has {most:,} anchors but batching.anchor_budget is "
            f"{config.anchor_budget:,}; raise it or lower batching.anchors.max_anchors"
        )
    return anchors


def check_sums(
    most_slots: int, longest: int, most_anchors: int, cost: PlanCost, config: BatchingConfig
) -> None:
    """Refuse costs whose sums might not fit 64 bits, before any is computed.

    Args:
        most_slots: Token slots of the fullest micro-batch.
        longest: Most tokens that a slot attends to.
        most_anchors: Anchors of the micro-batch with most.
        cost: Coefficients.
        config: Settings, for the number of micro-batches a step sums over.
    """
    attended = most_slots * longest
    dearest = (
        cost.per_micro_batch
        + cost.per_slot * most_slots
        + cost.per_slot_length * attended
        + cost.per_anchor * most_anchors
    )
    if max(dearest, attended) * config.micro_batches_per_step >= 2**62:
        raise PlanError(
            f"the cost of a step of {config.micro_batches_per_step:,} micro-batches of "
            f"{most_slots:,} slots exceeds 64 bits; lower batching.token_budget, "
            "batching.micro_batches_per_step or the coefficients of the cost"
        )
