"""Which split of the ranks, which token and anchor budget? Ranked, with the reason."""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from dflash_core.config import FrozenModel, changed
from dflash_core.errors import ConfigError, PlanError
from dflash_core.planning import BatchingConfig, EpochPlan, num_anchors, plan_epoch, relayout
from dflash_core.planning.limits import check_population, longest_allowed, usable_supervised
from dflash_core.profiling import screen_lengths
from dflash_core.throughput.cost import CostModel
from dflash_core.throughput.prediction import Prediction, predict
from dflash_core.throughput.topology import Split
from dflash_core.throughput.workload import Workload

__all__ = ["Option", "advise", "splits_of"]

BUDGET_SHARES = (1.0, 0.5, 0.25)
MOST_RANKS = 1_024
MOST_SPLITS = 32
KINDS: tuple[Literal["colocated", "disaggregated"], ...] = ("colocated", "disaggregated")


class Option(FrozenModel):
    """One way to run, and what it would give."""

    split: Split
    """Which ranks do what."""
    token_budget: int
    """Most token slots of a micro-batch."""
    anchor_budget: int | None
    """Most anchors of a micro-batch."""
    micro_batches_per_step: int
    """Micro-batches of a step, more for smaller budgets: a step keeps its size."""
    prediction: Prediction
    """What it would give."""
    share_of_best: float = Field(gt=0, le=1)
    """Throughput over that of the best option."""
    reason: str
    """What holds it back, in words."""


def splits_of(num_ranks: int, *, queue_depth: int = 2, shard_target: bool = False) -> list[Split]:
    """Return divisions of the ranks: colocated, and from most to fewest target ranks.

    Of up to 32 ranks they are all there; of more, as many are spread evenly from end to end.

    Example:
        >>> [split.label for split in splits_of(8)]
        ['8 colocated', '7+1', '6+2', '5+3', '4+4', '3+5', '2+6', '1+7']
    """
    num_divided = min(num_ranks, MOST_SPLITS) - 1
    counts = np.linspace(num_ranks - 1, 1, num_divided).round().astype(int).tolist()
    return [
        Split(
            num_ranks=num_ranks,
            num_target_ranks=count,
            queue_depth=queue_depth,
            shard_target=shard_target,
        )
        for count in (0, *counts)
    ]


def advise(
    lengths: ArrayLike,
    config: BatchingConfig,
    cost: CostModel,
    *,
    num_ranks: int,
    supervised: ArrayLike,
    block_size: int,
    seed: int = 0,
    epochs: int = 1,
    queue_depth: int = 2,
) -> list[Option]:
    """Rank splits of the ranks and budgets, best first.

    Token budgets are the configured one, which memory is known to hold, and smaller ones. Anchor
    budgets are the configured one and that which an average micro-batch would need, where it makes
    other micro-batches. A calibration with a feature cache, which the rank that trains fills and
    reads, or with a sharded target is of runs like that, and so are the options.

    Args:
        lengths: Sequence lengths in tokens, shape ``(num_samples,)``.
        config: Strategy, mixing and the largest budgets.
        cost: The calibrated machine.
        num_ranks: Processes in all.
        supervised: Supervised tokens of each sample, same shape.
        block_size: Block size of the drafter.
        seed: Seed of the run.
        epochs: Epochs of the run.
        queue_depth: Micro-batches that may wait between two stages.

    Raises:
        ConfigError: Too few or too many ranks, or settings that contradict each other.
        DataError: As `plan_epoch`.
        PlanError: No budget gives a plan.
    """
    if not 1 <= num_ranks <= MOST_RANKS:
        raise ConfigError(
            f"there are {num_ranks:,} ranks to divide; give 1 to {MOST_RANKS:,} with --gpus"
        )
    features, splits = "online", splits_of(num_ranks, queue_depth=queue_depth)
    if cost.fingerprint is not None and cost.fingerprint.shard_target:
        splits = splits_of(num_ranks, queue_depth=queue_depth, shard_target=True)
    if cost.fingerprint is not None and cost.fingerprint.features == "cache":
        features, splits = "cache", splits[:1]
    used, used_supervised = _used(config, lengths, supervised)
    balance = {kind: cost.plan_cost(kind, block_size=block_size, lengths=used) for kind in KINDS}
    found: list[tuple[Split, BatchingConfig, Prediction, str]] = []
    failures: list[PlanError] = []
    previous: EpochPlan | None = None
    for chosen in _budgets(config, used, used_supervised):
        try:
            plan = plan_epoch(
                lengths, chosen, epoch=0, seed=seed, world_size=1, supervised=supervised
            )
        except PlanError as error:  # too few anchors for a sample, or too many places
            failures.append(error)
            continue
        if previous is not None and _same_micro_batches(plan, previous):
            continue
        previous = plan
        work = Workload.of_plan(
            plan, block_size=block_size, attends_documents_only=cost.attends_documents_only
        )
        fixed = _fixed_part(work, cost)
        for split in splits:
            prediction = predict(
                relayout(plan, world_size=split.num_consumers, cost=balance[split.kind]),
                cost,
                block_size=block_size,
                topology=split,
                epochs=epochs,
                workload=work,
                features=features,
            )
            found.append((split, chosen, prediction, fixed))
    if not found:
        raise failures[0]
    found.sort(key=lambda option: -option[2].ktok_s)
    best = found[0][2].ktok_s
    return [
        Option(
            split=split,
            token_budget=chosen.token_budget,
            anchor_budget=chosen.anchor_budget,
            micro_batches_per_step=chosen.micro_batches_per_step,
            prediction=prediction,
            share_of_best=prediction.ktok_s / best,
            reason=f"{_reason(split, prediction)}; {fixed}",
        )
        for split, chosen, prediction, fixed in found
    ]


def _same_micro_batches(plan: EpochPlan, other: EpochPlan) -> bool:
    """Whether a budget that binds nowhere was all that differed."""
    return np.array_equal(plan.offsets, other.offsets) and np.array_equal(plan.order, other.order)


def _used(
    config: BatchingConfig, lengths: ArrayLike, supervised: ArrayLike
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the lengths that the largest budget uses, as it cuts them, and their supervision."""
    limit, setting = longest_allowed(config)
    screened = screen_lengths(lengths, max_length=limit, oversize=config.oversize, setting=setting)
    check_population(screened, config, 1, limit)
    tokens = usable_supervised(supervised, screened)
    assert tokens is not None
    return screened.lengths, tokens


def _holds(config: BatchingConfig, longest: int) -> bool:
    """Whether a smaller budget drops and cuts nothing more: options are of the same tokens."""
    try:
        return longest_allowed(config)[0] >= longest
    except ConfigError:
        return False


def _budgets(
    config: BatchingConfig, lengths: NDArray[np.int32], supervised: NDArray[np.int64]
) -> list[BatchingConfig]:
    anchors = num_anchors(supervised, config.anchors)
    per_slot = float(anchors.sum()) / float(lengths.sum(dtype=np.int64))
    options = []
    for share in BUDGET_SHARES:
        token_budget = int(config.token_budget * share)
        smaller = changed(config, {"token_budget": token_budget})
        if share < 1 and not _holds(smaller, int(lengths.max())):
            continue
        per_step = round(config.micro_batches_per_step / share)
        average = max(int(np.ceil(per_slot * token_budget)), int(anchors.max(initial=1)))
        tighter = config.anchor_budget is None or average < config.anchor_budget
        for anchor_budget in (
            (config.anchor_budget, average) if tighter else (config.anchor_budget,)
        ):
            changes = {
                "token_budget": token_budget,
                "anchor_budget": anchor_budget,
                "micro_batches_per_step": per_step,
            }
            options.append(changed(config, changes))
    return options


def _fixed_part(work: Workload, cost: CostModel) -> str:
    """Return how much a smaller budget pays for its many micro-batches, in words."""
    roles = (cost.target.coefficients, cost.draft.coefficients)
    whole = sum(float(role.seconds(work.totals)) for role in roles)
    fixed = work.slots.size * sum(role.constant_s for role in roles)
    return (
        f"{work.slots.size:,} micro-batches, whose fixed part is {fixed / max(whole, 1e-300):.0%} "
        "of the work"
    )


def _reason(split: Split, prediction: Prediction) -> str:
    """Return what binds, in words."""
    if prediction.bottleneck == "straggler":
        return f"ranks wait {prediction.waiting_share:.0%} of the time for the slowest of a step"
    if split.kind == "colocated":
        return (
            f"{prediction.bottleneck} takes most: target {prediction.target_busy:.0%}, drafter "
            f"{prediction.draft_busy:.0%} of each rank's time"
        )
    idle = (
        f"drafter ranks idle {prediction.starving_share:.0%}"
        if prediction.bottleneck != "draft"
        else f"target ranks idle {max(1 - prediction.target_busy, 0):.0%}"
    )
    return f"{prediction.bottleneck} binds, {idle}"
