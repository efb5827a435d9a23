"""Strategies side by side on the same lengths."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import ArrayLike
from pydantic import ConfigDict, Field

from dflash_core.config import FrozenModel, changed
from dflash_core.planning.config import BatchingConfig, Mixing
from dflash_core.planning.cost import PlanCost
from dflash_core.planning.diversity import DiversityReport, diversity_of
from dflash_core.planning.epoch_plan import EpochPlan
from dflash_core.planning.plan import Composition, compose_epoch, mix_epoch

__all__ = ["StrategyReport", "compare_strategies", "comparison_json"]

DETAILS = ("diversity", "length_eta2_vs_random", "step_length_eta2_vs_random")


class StrategyReport(FrozenModel):
    """One row of the comparison: a strategy under a mixing."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    name: str
    """Strategy."""
    mixing: Mixing
    """How its micro-batches are spread over steps and ranks."""
    padding_efficiency: float
    """Real tokens / token slots."""
    budget_fill: float
    """Token slots / what the budget would allow in as many micro-batches."""
    num_micro_batches: int
    """Micro-batches of the epoch."""
    num_steps: int
    """Optimizer steps of the epoch."""
    length_eta2: float
    """Share of length variance between micro-batches."""
    step_length_eta2: float
    """Share of length variance between optimizer steps."""
    pair_recurrence: float
    """Share of pairs of epoch 0 that meet again in epoch 1."""
    straggler_factor: float
    """Mean over steps of largest / mean rank cost."""
    distinct_shapes: int
    """Distinct (rows, padded length) pairs."""
    max_slots: int
    """Token slots of the fullest micro-batch."""
    num_dropped: int
    """Samples left out."""
    plan_s: float
    """Seconds that planning the epoch took."""
    diversity: DiversityReport
    """All measures, with the floors that chance gives."""
    length_eta2_vs_random: float | None = None
    """length_eta2 over that of strategy and mixing ``random``; none when that is 0."""
    step_length_eta2_vs_random: float | None = None
    """step_length_eta2 over that of strategy and mixing ``random``; none when that is 0."""
    plan: EpochPlan = Field(exclude=True, repr=False)
    """Plan of epoch 0."""


def compare_strategies(
    lengths: ArrayLike,
    config: BatchingConfig,
    *,
    strategies: Sequence[str],
    mixings: Sequence[Mixing],
    seed: int,
    world_size: int,
    supervised: ArrayLike | None = None,
    cost: PlanCost | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[StrategyReport]:
    """Plan epochs 0 and 1 under each strategy and mixing, and measure them.

    Args:
        lengths: Sequence lengths in tokens, shape ``(num_samples,)``.
        config: Settings; its strategy and mixing are replaced.
        strategies: Names of strategies.
        mixings: Mixings to try with each.
        seed: Seed of the run.
        world_size: Ranks that consume micro-batches.
        supervised: Supervised tokens of each sample, shape ``(num_samples,)``.
        cost: Measure that balances ranks.
        clock: Source of ``plan_s``.

    Returns:
        One report per strategy and mixing, in the order given.
    """

    def compose(name: str, epoch: int) -> Composition:
        chosen = changed(config, {"strategy": name})
        return compose_epoch(
            lengths, chosen, epoch=epoch, seed=seed, world_size=world_size, supervised=supervised
        )

    def mix(name: str, mixing: Mixing, composition: Composition) -> EpochPlan:
        chosen = changed(config, {"strategy": name, "mixing": mixing})
        return mix_epoch(composition, chosen, world_size=world_size, cost=cost)

    chance = diversity_of(mix("random", "random", compose("random", 0)))
    reports = []
    for name in strategies:
        later = compose(name, 1)  # first, so that compiling is not timed below
        start = clock()
        first = compose(name, 0)
        composing_s = clock() - start
        for mixing in mixings:
            following = mix(name, mixing, later)
            start = clock()
            current = mix(name, mixing, first)
            elapsed = composing_s + clock() - start
            reports.append(
                _report(name, mixing, current, diversity_of(current, following), chance, elapsed)
            )
    return reports


def comparison_json(
    reports: Sequence[StrategyReport], token_budget: int, *, details: bool = False
) -> dict[str, Any]:
    """Return the object that programs read; sample figures are the first strategy's input.

    Args:
        reports: The rows.
        token_budget: Most token slots of a micro-batch.
        details: Whether each row also holds every measure of diversity, and the hashes of its plan.
    """
    lengths = reports[0].plan.identity.lengths
    return {
        "num_samples": int(lengths.size),
        "total_tokens": int(lengths.sum(dtype="int64")),
        "token_budget": token_budget,
        "strategies": [_row(report, details) for report in reports],
    }


def _row(report: StrategyReport, details: bool) -> dict[str, Any]:
    row = report.model_dump(mode="json")
    if not details:
        return {name: value for name, value in row.items() if name not in DETAILS}
    hashes = {"content_hash": report.plan.content_hash, "layout_hash": report.plan.layout_hash}
    return {**row, **hashes}


def _report(
    name: str,
    mixing: Mixing,
    plan: EpochPlan,
    diversity: DiversityReport,
    chance: DiversityReport,
    elapsed: float,
) -> StrategyReport:
    capacity = plan.num_micro_batches * plan.identity.config.token_budget
    return StrategyReport(
        name=name,
        mixing=mixing,
        padding_efficiency=plan.padding_efficiency,
        budget_fill=int(plan.slots.sum()) / capacity,
        num_micro_batches=plan.num_micro_batches,
        num_steps=plan.num_steps,
        length_eta2=diversity.length_eta2,
        step_length_eta2=diversity.step_length_eta2,
        pair_recurrence=diversity.pair_recurrence or 0.0,
        straggler_factor=diversity.straggler_factor,
        distinct_shapes=diversity.distinct_shapes,
        max_slots=int(plan.slots.max()),
        num_dropped=plan.num_dropped,
        plan_s=elapsed,
        diversity=diversity,
        length_eta2_vs_random=_ratio(diversity.length_eta2, chance.length_eta2),
        step_length_eta2_vs_random=_ratio(diversity.step_length_eta2, chance.step_length_eta2),
        plan=plan,
    )


def _ratio(value: float, reference: float) -> float | None:
    return value / reference if reference > 0 else None
