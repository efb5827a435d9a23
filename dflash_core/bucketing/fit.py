"""Bucket edges: which lengths share a shape."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dflash_core.bucketing.baselines import edge_efficiency
from dflash_core.bucketing.config import BucketingConfig, EdgeObjective
from dflash_core.bucketing.dense import (
    batch_maximum_costs,
    best_dense_edges,
    lower_bound_costs,
    shape_costs,
)
from dflash_core.bucketing.histogram import Histogram, histogram_of, round_up
from dflash_core.bucketing.slots import best_slot_edges
from dflash_core.config import FrozenModel
from dflash_core.errors import ConfigError
from dflash_core.profiling import LengthProfile, find_spike

__all__ = ["BucketFit", "fit_bucket_edges", "fit_buckets"]


class BucketFit(FrozenModel):
    """Fitted edges, how good they are, and how good they could be at most."""

    edges: tuple[int, ...]
    """Increasing inclusive upper bounds in tokens."""
    objective: EdgeObjective
    """What was minimised."""
    optimum: float
    """Its value at these edges; slots for slots and batch_maximum."""
    num_candidates: int
    """Edges that were allowed."""
    gap: float | None
    """No edges at all can be better by more than this share; 0 = proven optimum, none = unknown."""
    padding_efficiency: float
    """Real tokens / token slots when each sample is padded to its edge."""
    curve: tuple[float, ...]
    """Optimum of exactly 1, 2, ... buckets."""
    isolated_length: int | None = None
    """Truncation spike that has an edge of its own."""

    def efficiency_curve(self, total_tokens: int) -> tuple[float, ...]:
        """Return real tokens / slots of the best 1, 2, ... buckets; not for objective cost.

        Raises:
            ConfigError: The optimum is a cost, not slots.
        """
        if self.objective == "cost":
            raise ConfigError("a fit for cost has no efficiency curve; set objective to 'slots'")
        return tuple(total_tokens / slots for slots in self.curve)


def fit_buckets(
    lengths: "ArrayLike | LengthProfile | Histogram", *, num_buckets: int, multiple_of: int = 1
) -> NDArray[np.int64]:
    """Return the bucket edges that minimise total token slots.

    A sample of length ``n`` is padded to the first edge that is at least ``n``. Exact, by divide
    and conquer over the ``m`` distinct rounded lengths: O(num_buckets * m log m).

    Args:
        lengths: Sequence lengths in tokens, shape ``(num_samples,)``, all positive, or their
            profile.
        num_buckets: Most edges to return; fewer when the data has fewer distinct lengths.
        multiple_of: Edges are rounded up to this many tokens.

    Returns:
        Increasing edges in tokens, shape ``(k,)`` with ``k <= num_buckets``.

    Raises:
        ConfigError: A count is below 1.
        DataError: ``lengths`` is empty or not positive.

    Example:
        >>> fit_buckets(np.array([60, 64, 120, 500]), num_buckets=2)
        array([120, 500])
    """
    if num_buckets < 1:
        raise ConfigError(f"num_buckets is {num_buckets}; give at least 1")
    histogram = histogram_of(lengths)
    candidates = _merge(histogram, round_up(histogram.lengths, multiple_of))
    chosen, _ = best_slot_edges(
        candidates.edges, candidates.counts, min(num_buckets, candidates.edges.size)
    )
    return candidates.edges[chosen]


def fit_bucket_edges(
    lengths: "ArrayLike | LengthProfile | Histogram", config: BucketingConfig
) -> BucketFit:
    """Fit edges to an objective, on a grid, with the gap to the optimum over all edges.

    Objective ``slots`` is exact over every allowed edge. The others are exact over at most
    ``max_candidates`` edges, those that waste fewest slots; ``gap`` bounds what that can cost.

    Args:
        lengths: Sequence lengths in tokens, shape ``(num_samples,)``, or their profile.
        config: Objective, grid and limits.

    Raises:
        ConfigError: A budget is missing, or the longest sample exceeds it.
        DataError: There are no samples.

    Example:
        >>> fit_bucket_edges([3, 4, 8, 8], BucketingConfig(num_buckets=2)).edges
        (4, 8)
    """
    histogram = histogram_of(lengths)
    spike = find_spike(histogram.lengths, histogram.counts) if config.isolate_spike else None
    candidates = _merge(histogram, _allowed_edges(histogram.lengths, config))
    fit = _fit(candidates, config, config.num_buckets)
    if spike is not None and config.num_buckets > 1 and candidates.edges.size > 1:
        fit = _with_spike(histogram, config, fit)
    edges = tuple(fit.edges.tolist())
    return BucketFit(
        edges=edges,
        objective=config.objective,
        optimum=float(fit.optimum),
        num_candidates=fit.num_candidates,
        gap=fit.gap,
        padding_efficiency=edge_efficiency(histogram, edges),
        curve=tuple(float(value) for value in fit.curve),
        isolated_length=None if spike is None or len(edges) < 2 else spike.length,
    )


@dataclass(frozen=True)
class _Candidates:
    """Allowed edges and, per edge, the samples for which it is the first to fit."""

    edges: NDArray[np.int64]
    counts: NDArray[np.int64]
    lowest: NDArray[np.int64]
    mean_lengths: NDArray[np.float64]


@dataclass(frozen=True)
class _Fit:
    edges: NDArray[np.int64]
    optimum: float
    curve: NDArray[Any]
    gap: float | None
    num_candidates: int


def _merge(histogram: Histogram, edges: NDArray[np.int64]) -> _Candidates:
    """Sum what shares a candidate edge; ``edges`` holds one per distinct length, not falling."""
    starts = np.flatnonzero(np.concatenate([[True], edges[1:] != edges[:-1]]))
    counts = np.add.reduceat(histogram.counts, starts)
    tokens = np.add.reduceat(histogram.counts * histogram.lengths, starts)
    return _Candidates(edges[starts], counts, edges[starts], tokens / counts)


def _allowed_edges(lengths: NDArray[np.int64], config: BucketingConfig) -> NDArray[np.int64]:
    """Return the smallest allowed edge for each length."""
    edges = round_up(lengths, config.multiple_of)
    if config.grid == "multiple" and config.objective == "slots":
        return edges
    if config.token_budget is None:
        raise ConfigError(
            f"objective '{config.objective}' on grid '{config.grid}' needs a token_budget"
        )
    if edges[-1] > config.token_budget:
        raise ConfigError(
            f"the longest sample needs a row of {int(edges[-1]):,} slots but token_budget is "
            f"{config.token_budget:,}; raise the budget"
        )
    if config.grid == "multiple":
        return edges
    rows = config.token_budget // edges
    return config.token_budget // (rows * config.multiple_of) * config.multiple_of


def _fit(candidates: _Candidates, config: BucketingConfig, num_buckets: int) -> _Fit:
    size = candidates.edges.size
    if config.objective == "slots":
        chosen, curve = best_slot_edges(candidates.edges, candidates.counts, min(num_buckets, size))
        return _Fit(candidates.edges[chosen], float(curve[-1]), curve, 0.0, size)
    thinned = size > config.max_candidates
    if thinned:
        candidates = _thin(candidates, config.max_candidates)
    limit = min(num_buckets, candidates.edges.size)
    budget = config.token_budget
    assert budget is not None  # _allowed_edges has asked for it
    if config.objective == "cost":
        costs = shape_costs(candidates.edges, candidates.counts, config.cost, budget)
    else:
        costs = batch_maximum_costs(
            candidates.edges, candidates.counts, candidates.mean_lengths, budget
        )
    chosen, curve = best_dense_edges(costs, limit)
    optimum = float(curve.min())
    gap = None if thinned else 0.0
    if thinned and config.objective == "cost":
        bounds = lower_bound_costs(candidates.lowest, candidates.counts, config.cost, budget)
        bound = float(best_dense_edges(bounds, limit)[1].min())
        gap = optimum / bound - 1
    return _Fit(candidates.edges[chosen], optimum, curve, gap, candidates.edges.size)


def _thin(candidates: _Candidates, size: int) -> _Candidates:
    """Keep the candidates that waste fewest slots."""
    kept, _ = best_slot_edges(candidates.edges, candidates.counts, size)
    starts = np.concatenate([[0], kept[:-1] + 1])
    counts = np.add.reduceat(candidates.counts, starts)
    tokens = np.add.reduceat(candidates.counts * candidates.mean_lengths, starts)
    return _Candidates(candidates.edges[kept], counts, candidates.lowest[starts], tokens / counts)


def _with_spike(histogram: Histogram, config: BucketingConfig, whole: _Fit) -> _Fit:
    """Fit one edge less to all but the longest samples, which get an edge to themselves."""
    body = Histogram(histogram.lengths[:-1], histogram.counts[:-1])
    spike = Histogram(histogram.lengths[-1:], histogram.counts[-1:])
    edge = _allowed_edges(spike.lengths, config)
    lower = _allowed_edges(body.lengths, config)
    if lower[-1] == edge[0]:  # the grid does not tell the spike from its neighbours
        return whole
    below = _fit(_merge(body, lower), config, config.num_buckets - 1)
    alone = _fit(_merge(spike, edge), config, 1)
    optimum = below.optimum + alone.optimum
    # Held against all edges, those without the isolated one included.
    bound = None if whole.gap is None else whole.optimum / (1 + whole.gap)
    return _Fit(
        edges=np.concatenate([below.edges, edge]),
        optimum=optimum,
        curve=np.concatenate([whole.curve[:1], below.curve + alone.optimum]),
        gap=None if bound is None else optimum / bound - 1,
        num_candidates=below.num_candidates + 1,
    )
