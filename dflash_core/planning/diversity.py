"""How alike are batches, and how evenly are ranks loaded? Exact measures of a plan, all linear."""

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dflash_core.compiled import compiled
from dflash_core.config import FrozenModel
from dflash_core.planning.cost import PlanCost
from dflash_core.planning.epoch_plan import EpochPlan

__all__ = [
    "DiversityReport",
    "Spread",
    "adjacent_correlation",
    "distinct_shapes",
    "diversity_of",
    "length_eta2",
    "pair_recurrence",
    "step_length_eta2",
    "straggler_factor",
]


class Spread(FrozenModel):
    """Distribution of a count over micro-batches or steps."""

    least: int
    """Smallest value."""
    mean: float
    """Mean."""
    most: int
    """Largest value."""
    cv: float
    """Standard deviation over mean; 0 when the mean is 0."""

    @classmethod
    def of(cls, values: NDArray[np.int64]) -> "Spread":
        """Summarise counts, shape ``(n,)`` with ``n >= 1``."""
        mean = float(values.mean())
        cv = float(values.std()) / mean if mean else 0.0
        return cls(least=int(values.min()), mean=mean, most=int(values.max()), cv=cv)


class DiversityReport(FrozenModel):
    """How much of the epoch's variety each micro-batch and each step holds."""

    length_eta2: float = Field(ge=0, le=1)
    """Share of length variance that lies between micro-batches."""
    length_eta2_floor: float
    """What random groups of these numbers give: micro-batches / samples."""
    step_length_eta2: float = Field(ge=0, le=1)
    """Share of length variance that lies between optimizer steps."""
    step_length_eta2_floor: float
    """What random steps give: steps / samples."""
    pair_recurrence: float | None = Field(default=None, ge=0, le=1)
    """Share of the pairs that share a micro-batch now and do so again in the next epoch, exact."""
    adjacent_correlation: float
    """Correlation of the mean length of micro-batches that follow each other on a rank."""
    straggler_factor: float = Field(ge=1)
    """Mean over steps of largest / mean rank cost."""
    distinct_shapes: int
    """Distinct (rows, padded length) pairs."""
    samples_per_micro_batch: Spread
    """Samples of a micro-batch."""
    supervised_per_step: Spread | None = None
    """Supervised tokens of a step, when they were given."""


def diversity_of(
    plan: EpochPlan, next_plan: EpochPlan | None = None, *, cost: PlanCost | None = None
) -> DiversityReport:
    """Measure a plan; recurrence needs the plan of the following epoch.

    Args:
        plan: The plan to measure.
        next_plan: Plan of the next epoch for the same samples.
        cost: Measure of rank load; the plan's own when not given.
    """
    per_step = _step_sums(plan, plan.supervised_tokens)
    given = plan.identity.supervised is not None
    return DiversityReport(
        length_eta2=length_eta2(plan),
        length_eta2_floor=plan.num_micro_batches / plan.num_samples,
        step_length_eta2=step_length_eta2(plan),
        step_length_eta2_floor=plan.num_steps / plan.num_samples,
        pair_recurrence=None if next_plan is None else pair_recurrence(plan, next_plan),
        adjacent_correlation=adjacent_correlation(plan),
        straggler_factor=straggler_factor(plan, cost),
        distinct_shapes=distinct_shapes(plan),
        samples_per_micro_batch=Spread.of(np.diff(plan.offsets)),
        supervised_per_step=Spread.of(per_step) if given else None,
    )


def length_eta2(plan: EpochPlan) -> float:
    """Return the between-micro-batch share of the sum of squares of length; 0 if none varies."""
    return _eta2(plan, plan.real_tokens, np.diff(plan.offsets))


def step_length_eta2(plan: EpochPlan) -> float:
    """Return the between-step share of the sum of squares of length; repeats do not count."""
    return _eta2(plan, _step_sums(plan, plan.real_tokens), _step_sums(plan, np.diff(plan.offsets)))


def pair_recurrence(first: EpochPlan, second: EpochPlan) -> float:
    """Return P(two samples share a micro-batch in ``second`` | they share one in ``first``).

    Exact: pairs are counted in the table of (micro-batch in first, micro-batch in second).
    Without any pair (all micro-batches hold one sample) it is 0.
    """
    size = 1 + max(int(first.order.max()), int(second.order.max()))
    where = np.full(size, -1, dtype=np.int32)
    where[second.order] = np.repeat(
        np.arange(second.num_micro_batches, dtype=np.int32), np.diff(second.offsets)
    )
    counts = np.diff(first.offsets)
    pairs = int((counts * (counts - 1) // 2).sum())
    met = int(_pairs_met_again(first.order, first.offsets, where, second.num_micro_batches))
    return met / pairs if pairs else 0.0


def straggler_factor(plan: EpochPlan, cost: PlanCost | None = None) -> float:
    """Return the mean over steps of the largest rank cost / the mean rank cost."""
    costs = plan.costs(cost)
    held = np.where(plan.assignment >= 0, costs[plan.assignment], 0)
    loads = held.sum(axis=1, dtype=np.float64)
    means = loads.mean(axis=1)
    return float(np.mean(np.where(means > 0, loads.max(axis=1) / np.maximum(means, 1e-300), 1.0)))


def adjacent_correlation(plan: EpochPlan) -> float:
    """Return the correlation of mean length of consecutive micro-batches, pooled over ranks."""
    mean_length = plan.real_tokens / np.diff(plan.offsets)
    timeline = plan.assignment.transpose(2, 0, 1).reshape(plan.assignment.shape[2], -1)
    before, after = [], []
    for rank in timeline:
        run = mean_length[rank[rank >= 0]]
        before.append(run[:-1])
        after.append(run[1:])
    x, y = np.concatenate(before), np.concatenate(after)
    if x.size < 2 or not x.std() or not y.std():
        return 0.0
    return float(np.clip(np.corrcoef(x, y)[0, 1], -1.0, 1.0))


def distinct_shapes(plan: EpochPlan) -> int:
    """Return the number of distinct (rows, padded length) pairs."""
    # One number for each pair: rows times slots stay within 63 bits.
    return int(np.unique(plan.rows * (plan.padded_lengths.max() + 1) + plan.padded_lengths).size)


def _step_sums(plan: EpochPlan, values: NDArray[np.int64]) -> NDArray[np.int64]:
    sums = np.zeros(plan.num_steps, dtype=np.int64)
    np.add.at(sums, plan.step_of, values)
    return sums


def _eta2(plan: EpochPlan, tokens: NDArray[np.int64], counts: NDArray[np.int64]) -> float:
    mean = plan.total_tokens / plan.num_samples
    squares = plan.identity.lengths
    total = _squared_deviation(plan, squares, mean)
    if total <= 0:
        return 0.0
    between = float((counts * (tokens / counts - mean) ** 2).sum())
    return float(min(between / total, 1.0))


def _squared_deviation(plan: EpochPlan, lengths: NDArray[np.int32], mean: float) -> float:
    if lengths.size == plan.num_samples:
        return float(_deviation(lengths, mean))
    used = np.zeros(int(plan.order.max()) + 1, dtype=np.bool_)
    used[plan.order] = True
    kept = plan.identity.kept
    present = used[: lengths.size] if kept is None else used[kept[kept < used.size]]
    return float(_deviation(lengths[: present.size][present], mean))


@compiled
def _deviation(lengths, mean):
    total = 0.0
    for length in lengths:
        total += (length - mean) * (length - mean)
    return total


@compiled
def _pairs_met_again(order, offsets, where, num_groups):
    seen = np.zeros(num_groups, dtype=np.int64)
    pairs = 0
    for index in range(offsets.size - 1):
        for place in range(offsets[index], offsets[index + 1]):
            group = where[order[place]]
            if group >= 0:
                pairs += seen[group]
                seen[group] += 1
        for place in range(offsets[index], offsets[index + 1]):
            group = where[order[place]]
            if group >= 0:
                seen[group] = 0
    return pairs
