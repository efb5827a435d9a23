"""Predict a plan's throughput: cost of each micro-batch, then the epoch as events."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dflash_core.config import FrozenModel, changed
from dflash_core.errors import CalibrationError
from dflash_core.planning import EpochPlan
from dflash_core.throughput.cost import CostModel, RoleFit
from dflash_core.throughput.simulation import Durations, Timeline, route_targets, simulate
from dflash_core.throughput.topology import Split, Topology
from dflash_core.throughput.workload import Workload

__all__ = ["Prediction", "Stage", "durations_of", "predict", "timeline_of"]

NOT_AVERAGED = frozenset({"bottleneck", "first", "later"})

Stage = Literal["prefetch", "target", "transfer", "draft", "straggler"]


class Prediction(FrozenModel):
    """What a plan is expected to cost, over all epochs of the run."""

    ktok_s: float
    """Real tokens per second of all ranks, in thousands."""
    low: float
    """Lower end of the interval of ktok_s."""
    high: float
    """Upper end of the interval of ktok_s."""
    step_s: float
    """Mean seconds of an optimizer step."""
    epoch_s: float
    """Mean seconds of an epoch."""
    run_s: float
    """Seconds of all epochs."""
    device_hours: float
    """Hours of all ranks' devices for all epochs."""
    bottleneck: Stage
    """What binds: the busiest stage, or waiting for the slowest rank of a step."""
    waiting_share: float = Field(ge=0, le=1)
    """Share of the consuming ranks' time spent waiting for the slowest of a step."""
    starving_share: float = Field(ge=0, le=1)
    """Share of the consuming ranks' time spent waiting for input."""
    prefetch_busy: float = Field(ge=0)
    """Share of their time that consuming ranks read and lay out, wherever a core is found for it;
    busy shares are defined as training measures them, see
    `dflash_core.training.telemetry.metrics`."""
    target_busy: float = Field(ge=0)
    """Share of their time that ranks which run the target spend on it."""
    draft_busy: float = Field(ge=0)
    """Share of their time that ranks which run the drafter spend on it, updates included; summing
    gradients is waiting."""
    prefetch_queue: float = Field(ge=0)
    """Micro-batches that wait, read, for a rank that begins with them, mean over time."""
    feature_queue: float = Field(ge=0)
    """Micro-batches that wait, with features, for a drafter rank; 0 when colocated."""
    first: "Prediction | None" = None
    """The first epoch, when it runs the target and keeps the features that later ones read."""
    later: "Prediction | None" = None
    """One epoch that reads kept features."""

    def of_epoch(self, epoch: int) -> "Prediction":
        """Return what was predicted for one epoch, counted from 0."""
        return (self.later if epoch else self.first) or self

    def run_ktok_s(self, pilot_ktok_s: float) -> float:
        """Return the run's throughput if it differs from this as a pilot with the target does."""
        return self.ktok_s * pilot_ktok_s / self.of_epoch(0).ktok_s


def predict(
    plan: EpochPlan,
    cost: CostModel,
    *,
    block_size: int,
    topology: Topology | None = None,
    epochs: int = 1,
    max_steps: int | None = None,
    workload: Workload | None = None,
    features: Literal["online", "cache"] = "online",
) -> Prediction:
    """Predict a plan's throughput.

    The interval holds the plan under each fit of a role that leaves a measured shape out, widened
    by how unsure the rehearsal was and how far this machine strayed from its predictions before.

    Args:
        plan: The epoch's plan, made with supervised tokens.
        cost: The calibrated machine.
        block_size: Block size of the drafter.
        topology: Which ranks do what; all the plan's ranks run both models when not given.
        epochs: Epochs of the run.
        max_steps: Steps after which the run ends even so.
        workload: What the plan's micro-batches hold, when it is known already.
        features: Whether epochs after the first read features that the first one kept. It is taken
            to begin with an empty cache.

    Raises:
        CalibrationError: The plan was made for another number of ranks, or without supervised
            tokens, or reading features was not calibrated, or nothing takes any time.
    """
    if topology is None:
        topology = Split(num_ranks=plan.assignment.shape[2])
    if workload is None:
        workload = Workload.of_plan(
            plan, block_size=block_size, attends_documents_only=cost.attends_documents_only
        )
    length = min(epochs, (max_steps or np.inf) / max(plan.num_steps, 1))

    def of_epochs(count: float, cost: CostModel) -> Prediction:
        return _predicted(plan, workload, cost, topology, count)

    if features == "online":
        return of_epochs(length, cost)
    reading = cost.reading()
    if length <= 1:
        return of_epochs(length, cost)
    return _joined(of_epochs(1, cost), of_epochs(1, reading), length)


def timeline_of(
    plan: EpochPlan, workload: Workload, cost: CostModel, topology: Topology
) -> Timeline:
    """Run a plan's epoch in simulated time.

    Raises:
        CalibrationError: The plan was made for another number of ranks.
    """
    return _timeline(plan, workload, cost, topology, _routes(plan, cost, topology))


def _timeline(
    plan: EpochPlan,
    workload: Workload,
    cost: CostModel,
    topology: Topology,
    routes: NDArray[np.int64] | None,
) -> Timeline:
    durations = durations_of(workload, cost, topology)
    return simulate(plan.assignment, durations, routes=routes, depth=topology.queue_depth)


def _routes(plan: EpochPlan, cost: CostModel, topology: Topology) -> NDArray[np.int64] | None:
    """Return the target rank of each place of the plan; None when ranks run both models."""
    ranks = plan.assignment.shape[2]
    if topology.num_consumers != ranks:
        raise CalibrationError(
            f"the plan is laid out for {ranks} consuming ranks and the topology has "
            f"{topology.num_consumers}; plan with world_size {topology.num_consumers}"
        )
    if topology.kind == "colocated":
        return None
    targets = topology.num_ranks - topology.num_consumers
    costs = plan.costs(cost.target_cost())
    return route_targets(plan.assignment, costs, targets, topology.shard_target)


def durations_of(workload: Workload, cost: CostModel, topology: Topology) -> Durations:
    """Return the seconds of each stage for each micro-batch."""
    amounts = workload.amounts
    prefetch = cost.prefetch.coefficients.seconds(amounts)
    target = cost.target.coefficients.seconds(amounts)
    transfer = cost.transfer_latency_s + cost.transfer_s_per_token * workload.tokens
    draft = cost.draft.coefficients.seconds(amounts)
    if not cost.overlaps:
        # No core is free to read ahead: what it takes is taken from the rank's own computing.
        if topology.kind == "disaggregated":
            target = target + prefetch
        draft = draft + prefetch
        prefetch = np.zeros_like(prefetch)
    prefetch, target, transfer, draft = (
        cost.correction * stage for stage in (prefetch, target, transfer, draft)
    )
    step_s = cost.correction * cost.step_seconds(topology.num_consumers)
    return Durations(prefetch, target, transfer, draft, step_s, cost.jitter)


def _spread(
    plan: EpochPlan,
    workload: Workload,
    cost: CostModel,
    topology: Topology,
    routes: NDArray[np.int64] | None,
    epoch_s: float,
) -> tuple[float, float]:
    """Return by which factors the epoch could take longer and shorter, both at least 1.

    Only each role's extreme fits are simulated: a stage that does not bind may change unnoticed.
    """
    slowest = fastest = epoch_s
    for role, fit in (("prefetch", cost.prefetch), ("target", cost.target), ("draft", cost.draft)):
        ranked = sorted(fit.alternatives, key=lambda one: float(one.seconds(workload.totals)))
        for extreme in ranked[:1] + ranked[-1:]:
            altered = changed(cost, {role: RoleFit(coefficients=extreme)})
            seconds = _timeline(plan, workload, altered, topology, routes).epoch_s
            slowest, fastest = max(slowest, seconds), min(fastest, seconds)
    common = np.hypot(cost.drift, cost.correction_error)
    slower, faster = slowest / epoch_s, epoch_s / max(fastest, 1e-300)
    return 1 + float(np.hypot(slower - 1, common)), 1 + float(np.hypot(faster - 1, common))


def _predicted(
    plan: EpochPlan, workload: Workload, cost: CostModel, topology: Topology, epochs: float
) -> Prediction:
    routes = _routes(plan, cost, topology)
    timeline = _timeline(plan, workload, cost, topology, routes)
    epoch_s = timeline.epoch_s
    if epoch_s <= 0:
        raise CalibrationError(
            "the calibration says that micro-batches take no time at all; run dflash-flow calibrate"
        )
    spread = _spread(plan, workload, cost, topology, routes, epoch_s)
    step_s = cost.correction * cost.step_seconds(topology.num_consumers)
    consumers = topology.num_consumers
    targets = topology.num_ranks - consumers or consumers
    prefetch_s, target_s, transfer_s, draft_s = timeline.busy_s
    draft_s += step_s * plan.num_steps * consumers
    shares: dict[Stage, float] = {
        "prefetch": prefetch_s / (targets * epoch_s),
        "target": target_s / (targets * epoch_s),
        "transfer": transfer_s / (targets * epoch_s),
        "draft": draft_s / (consumers * epoch_s),
        "straggler": timeline.step_waited_s / (consumers * epoch_s),
    }
    prefetch_busy, target_busy, draft_busy = _busy(plan, workload, cost, topology, epoch_s)
    ktok_s = plan.total_tokens / epoch_s / 1000
    return Prediction(
        ktok_s=ktok_s,
        low=ktok_s / spread[0],
        high=ktok_s * spread[1],
        step_s=epoch_s / max(plan.num_steps, 1),
        epoch_s=epoch_s,
        run_s=epoch_s * epochs,
        device_hours=epoch_s * epochs * topology.num_ranks / 3600,
        bottleneck=max(shares, key=lambda name: shares[name]),
        waiting_share=_share(shares["straggler"]),
        starving_share=_share(timeline.input_waited_s / (consumers * epoch_s)),
        prefetch_busy=prefetch_busy,
        target_busy=target_busy,
        draft_busy=draft_busy,
        prefetch_queue=timeline.mean_queues[0],
        feature_queue=timeline.mean_queues[1],
    )


def _busy(
    plan: EpochPlan, workload: Workload, cost: CostModel, topology: Topology, epoch_s: float
) -> tuple[float, float, float]:
    """Return the busy shares of prefetch, target and drafter, each of its own work."""
    own = durations_of(workload, changed(cost, {"overlaps": True}), topology)
    used = plan.assignment[plan.assignment >= 0]
    consumers = topology.num_consumers
    targets = topology.num_ranks - consumers or consumers
    update_s = cost.correction * cost.step_s * plan.num_steps
    return (
        float(own.prefetch[used].sum()) / (consumers * epoch_s),
        float(own.target[used].sum()) / (targets * epoch_s),
        (float(own.draft[used].sum()) / consumers + update_s) / epoch_s,
    )


def _joined(first: Prediction, later: Prediction, epochs: float) -> Prediction:
    """Return the whole run: figures are means over time, throughput is tokens over seconds."""
    run_s = first.epoch_s + (epochs - 1) * later.epoch_s
    weight = first.epoch_s / run_s

    def mean(name: str) -> float:
        return weight * getattr(first, name) + (1 - weight) * getattr(later, name)

    summed = {"epoch_s": run_s / epochs, "run_s": run_s}
    summed["step_s"] = (first.step_s + (epochs - 1) * later.step_s) / epochs
    summed["device_hours"] = first.device_hours + (epochs - 1) * later.device_hours
    averaged = [name for name in Prediction.model_fields if name not in NOT_AVERAGED | set(summed)]
    longer = first if weight > 0.5 else later
    return Prediction(
        **{name: mean(name) for name in averaged},
        **summed,
        bottleneck=longer.bottleneck,
        first=first,
        later=later,
    )


def _share(value: float | NDArray[np.float64]) -> float:
    return float(min(max(value, 0.0), 1.0))
