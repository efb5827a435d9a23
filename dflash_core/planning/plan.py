"""From lengths to an epoch plan: compose micro-batches, mix them into steps, lay them out."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dflash_core.compiled import compiled
from dflash_core.errors import ConfigError, PlanError
from dflash_core.planning.anchors import num_anchors
from dflash_core.planning.batches import Batches, Samples
from dflash_core.planning.config import BatchingConfig
from dflash_core.planning.cost import PlanCost
from dflash_core.planning.epoch_plan import EpochPlan
from dflash_core.planning.identity import PlanIdentity
from dflash_core.planning.limits import (
    budgeted_anchors,
    check_places,
    check_population,
    check_sums,
    longest_allowed,
    usable_supervised,
)
from dflash_core.planning.mixing import mix_steps
from dflash_core.planning.ranks import assign_ranks
from dflash_core.planning.shuffling import random_stream
from dflash_core.planning.strategies import STRATEGIES
from dflash_core.planning.strategies.bucketed import with_buckets_for
from dflash_core.profiling import Screened, screen_lengths

__all__ = ["Composition", "compose_epoch", "mix_epoch", "plan_epoch"]

COMPOSE, MIX, LAY_OUT = range(3)


@dataclass(frozen=True)
class Composition:
    """Who shares a micro-batch in an epoch: the same under every mixing.

    Attributes:
        batches: The micro-batches.
        sums: Real tokens, anchors and supervised tokens of each, shape ``(3, num_micro_batches)``.
        screened: The lengths that were used, and what became of the others.
        supervised: Supervised tokens of each used sample; None when not given.
        limit: Longest sample in tokens.
        seed: Seed of the run.
        epoch: Epoch.
    """

    batches: Batches
    sums: NDArray[np.int64]
    screened: Screened
    supervised: NDArray[np.int64] | None
    limit: int
    seed: int
    epoch: int


def plan_epoch(
    lengths: ArrayLike,
    config: BatchingConfig,
    *,
    epoch: int,
    seed: int,
    world_size: int,
    supervised: ArrayLike | None = None,
    cost: PlanCost | None = None,
) -> EpochPlan:
    """Plan one epoch. Pure: the same arguments give the same bytes on every rank.

    What a step holds depends on neither ``world_size`` nor ``cost``; these decide only which rank
    runs it when.

    Args:
        lengths: Sequence lengths in tokens, shape ``(num_samples,)``.
        config: Strategy, budgets and mixing.
        epoch: Epoch, from 0.
        seed: Seed of the run.
        world_size: Ranks that consume micro-batches.
        supervised: Supervised tokens of each sample, shape ``(num_samples,)``; needed for an
            anchor budget.
        cost: Measure that balances ranks; slots x (1 + padded length / 3000) when not given.

    Raises:
        ConfigError: A setting is unknown or contradicts another.
        DataError: A length is unusable or too long under ``oversize="error"``.
        PlanError: No plan satisfies the limits.

    Example:
        >>> config = BatchingConfig(strategy="sorted", token_budget=16, micro_batches_per_step=2)
        >>> plan = plan_epoch([8, 2, 7, 2, 8], config, epoch=0, seed=0, world_size=2)
        >>> plan.num_micro_batches, plan.num_steps, round(plan.padding_efficiency, 3)
        (3, 2, 0.844)
    """
    composition = compose_epoch(
        lengths, config, epoch=epoch, seed=seed, world_size=world_size, supervised=supervised
    )
    return mix_epoch(composition, config, world_size=world_size, cost=cost)


def compose_epoch(
    lengths: ArrayLike,
    config: BatchingConfig,
    *,
    epoch: int,
    seed: int,
    world_size: int,
    supervised: ArrayLike | None = None,
) -> Composition:
    """Group samples into micro-batches: the first half of `plan_epoch`, with its arguments."""
    for name, value, least in (
        ("epoch", epoch, 0),
        ("seed", seed, 0),
        ("world_size", world_size, 1),
    ):
        if value < least:
            raise ConfigError(f"{name} is {value}; give at least {least}")
    if config.strategy not in STRATEGIES:
        known = ", ".join(STRATEGIES)
        raise ConfigError(f"unknown strategy '{config.strategy}'; set batching.strategy to {known}")
    limit, setting = longest_allowed(config)
    screened = screen_lengths(lengths, max_length=limit, oversize=config.oversize, setting=setting)
    check_population(screened, config, world_size, limit)
    tokens = usable_supervised(supervised, screened)
    anchors = None if tokens is None else num_anchors(tokens, config.anchors).astype(np.int32)
    samples = Samples(screened.lengths, budgeted_anchors(anchors, config))
    batches = STRATEGIES[config.strategy](samples, config, random_stream(seed, epoch, COMPOSE))
    real_tokens = _sums(batches.lengths, batches.offsets, 1)
    sums = np.stack([real_tokens, _batch_sums(batches, anchors), _batch_sums(batches, tokens)])
    return Composition(batches, sums, screened, tokens, limit, seed, epoch)


def mix_epoch(
    composition: Composition,
    config: BatchingConfig,
    *,
    world_size: int,
    cost: PlanCost | None = None,
) -> EpochPlan:
    """Spread micro-batches over steps and ranks: the second half of `plan_epoch`.

    Args:
        composition: What `compose_epoch` returned.
        config: The same settings, but for the mixing, which may be another.
        world_size: As for `plan_epoch`.
        cost: As for `plan_epoch`.
    """
    screened = composition.screened
    config = with_buckets_for(int(screened.lengths.sum()), config)
    identity = PlanIdentity(
        lengths=screened.lengths,
        kept=screened.kept,
        supervised=composition.supervised,
        config=config,
        seed=composition.seed,
        epoch=composition.epoch,
        world_size=world_size,
        cost=PlanCost() if cost is None else cost,
    )
    batches, sums, full, short, dropped = _into_steps(composition, config)
    check_places(full.shape[0] + bool(short.size), world_size, config)
    steps, weights = _steps(full, short, config)
    real_tokens, batch_anchors, supervised_tokens = sums
    check_sums(
        int((batches.rows * batches.padded_lengths).max()),
        int(screened.lengths.max() if batches.packed else batches.padded_lengths.max()),
        int(batch_anchors.max()),
        identity.cost,
        config,
    )
    slot_lengths = (
        _sums(batches.lengths, batches.offsets, 2)
        if batches.packed
        else batches.rows * batches.padded_lengths**2
    )
    costs = identity.cost.of(
        batches.rows, batches.padded_lengths, batch_anchors, slot_lengths=slot_lengths
    )
    assignment, loss_weight = _assign(steps, weights, costs, identity)
    return EpochPlan(
        order=_original(batches.order, screened),
        offsets=batches.offsets,
        padded_lengths=batches.padded_lengths,
        rows=batches.rows,
        real_tokens=real_tokens,
        slot_lengths=slot_lengths,
        num_anchors=batch_anchors,
        supervised_tokens=supervised_tokens,
        assignment=assignment,
        loss_weight=loss_weight,
        packed=batches.packed,
        max_length=composition.limit,
        dropped=dropped,
        num_truncated=screened.num_truncated,
        num_repeats=int(np.count_nonzero(weights == 0) - np.count_nonzero(steps < 0)),
        identity=identity,
    )


def _into_steps(
    composition: Composition, config: BatchingConfig
) -> tuple[Batches, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], dict[str, int]]:
    """Return micro-batches and their sums, full steps, the short one, and drops by reason."""
    batches, sums, screened = composition.batches, composition.sums, composition.screened
    full, short = mix_steps(
        config.mixing,
        num_samples=batches.num_samples,
        real_tokens=sums[0],
        padded_lengths=batches.padded_lengths,
        micro_batches_per_step=config.micro_batches_per_step,
        rng=random_stream(composition.seed, composition.epoch, MIX),
    )
    dropped = {
        kind: count for kind, count in screened.bad.items() if count and _drops(kind, config)
    }
    if short.size and config.tail == "drop":
        if not full.size:
            raise PlanError(
                f"{short.size} micro-batches fill no step of {config.micro_batches_per_step}; "
                "lower batching.micro_batches_per_step or set batching.tail to 'partial'"
            )
        dropped["tail"] = int(batches.num_samples[short].sum())
        keep = np.ones(batches.padded_lengths.size, dtype=np.bool_)
        keep[short] = False
        batches, sums, full = batches.keep(keep), sums[:, keep], (np.cumsum(keep) - 1)[full]
        short = short[:0]
    return batches, sums, full, short, dropped


def _assign(
    steps: NDArray[np.int64],
    weights: NDArray[np.float64],
    costs: NDArray[np.int64],
    identity: PlanIdentity,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    # A repeat is placed under a number of its own, so that it can be told from the original.
    repeats = np.flatnonzero((weights.ravel() == 0) & (steps.ravel() >= 0))
    originals = steps.ravel()[repeats]
    numbered = steps.copy()
    numbered.ravel()[repeats] = costs.size + np.arange(repeats.size)
    placed = assign_ranks(
        identity.config.mixing,
        numbered,
        np.concatenate([costs, costs[originals]]),
        world_size=identity.world_size,
        rng=random_stream(identity.seed, identity.epoch, LAY_OUT),
    )
    loss_weight = ((placed >= 0) & (placed < costs.size)).astype(np.float64)
    repeated = placed >= costs.size
    placed[repeated] = originals[placed[repeated] - costs.size]
    return placed, loss_weight


def _steps(
    full: NDArray[np.int64],
    short: NDArray[np.int64],
    config: BatchingConfig,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Append the short step to the full ones: places that stay idle hold -1, repeats weigh 0."""
    if not short.size:
        return full, np.ones(full.shape)
    room = config.micro_batches_per_step - short.size
    if config.tail == "repeat":
        # Spread over the epoch; the step's own members only when there is nothing else.
        fill = full.ravel() if full.size else short
        fill = fill[np.arange(room) * fill.size // room % fill.size] if room else fill[:0]
    else:
        fill = np.full(room, -1, dtype=np.int64)
    last = np.concatenate([short, fill])[None, :]
    weights = np.concatenate([np.ones(full.size + short.size), np.zeros(room)])
    return np.concatenate([full, last]), weights.reshape(-1, config.micro_batches_per_step)


def _original(order: NDArray[np.int32], screened: Screened) -> NDArray[np.int32]:
    return order if screened.kept is None else screened.kept[order].astype(np.int32)


def _drops(kind: str, config: BatchingConfig) -> bool:
    return kind != "oversize" or config.oversize == "drop"


def _batch_sums(batches: Batches, values: NDArray[np.integer] | None) -> NDArray[np.int64]:
    if values is None:
        return np.zeros_like(batches.padded_lengths)
    return _sums(values[batches.order], batches.offsets, 1)


@compiled
def _sums(values, offsets, power):
    sums = np.zeros(offsets.size - 1, dtype=np.int64)
    for index in range(sums.size):
        for place in range(offsets[index], offsets[index + 1]):
            value = np.int64(values[place])
            sums[index] += value if power == 1 else value * value
    return sums
