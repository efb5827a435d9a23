"""All epochs of a run as plans: known before the first step, alike on every rank.

What a step holds, which rank consumes it and which rank runs the target for it follow from the
plan alone, so no rank ever asks another what comes next.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from dflash_core.corpus.store import TokenStore
from dflash_core.draft.anchors import EVERY_POSITION, MOST_SUPERVISED
from dflash_core.planning import BatchingConfig, EpochPlan, num_anchors, plan_epoch
from dflash_core.throughput import route_targets
from dflash_core.training.batches.types import MicroBatch
from dflash_core.training.config import TrainingJob

__all__ = ["Epochs", "StepCounts", "Work", "in_rounds"]

STEPS = "number of steps (training.epochs, training.max_steps)"


@dataclass(frozen=True)
class StepCounts:
    """Tokens of one step over all ranks.

    Attributes:
        real_tokens: Tokens of samples; copies that only fill the step are none.
        token_slots: Positions, padding and copies included.
        supervised_tokens: Tokens that carry loss.
    """

    real_tokens: int
    token_slots: int
    supervised_tokens: int


@dataclass(frozen=True)
class Work:
    """One micro-batch in the order of the whole run.

    Attributes:
        number: Its place in that order.
        step: Step of the run that it belongs to, from 0.
        consumer: Rank that consumes it.
        target: Target rank that runs the target for it, from 0; 0 when colocated.
        micro_batch: What it holds.
    """

    number: int
    step: int
    consumer: int
    target: int
    micro_batch: MicroBatch


class Epochs:
    """The run's plans, made when their epoch comes and counted before.

    Args:
        job: The run.
        store: Its samples.
        held_out: Held-out samples, measured after steps that are due.

    Attributes:
        steps_per_epoch: Steps of each epoch.
        num_steps: Steps of the run: all epochs, or ``training.max_steps``.
    """

    def __init__(self, job: TrainingJob, store: TokenStore, held_out: TokenStore | None) -> None:
        self._job = job
        self._lengths = store.lengths
        self._supervised = store.supervised
        self._held_out = held_out
        self._lock = threading.Lock()  # the pipeline looks into the next epoch from its thread
        self._plans: dict[int, EpochPlan] = {}
        self._routes: dict[int, NDArray[np.int64]] = {}
        epochs = range(job.training.epochs)
        self.steps_per_epoch = [self.plan(epoch).num_steps for epoch in epochs]
        total = sum(self.steps_per_epoch)
        self.num_steps = min(total, job.training.max_steps or total)
        self._ends = list(accumulate(self.steps_per_epoch))

    def plan(self, epoch: int) -> EpochPlan:
        """Return the plan of an epoch."""
        with self._lock:
            if epoch not in self._plans:
                self._plans = {e: p for e, p in self._plans.items() if abs(e - epoch) <= 1}
                self._plans[epoch] = plan_epoch(
                    self._lengths,
                    self._job.batching,
                    epoch=epoch,
                    seed=self._job.training.seed,
                    world_size=self._job.training.topology.num_consumers,
                    supervised=self._supervised,
                    cost=self._job.consumer_cost,
                )
            return self._plans[epoch]

    def locate(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step of the run, and its place in that epoch."""
        epoch = int(np.searchsorted(self._ends, step, side="right"))
        return epoch, step - (self._ends[epoch] - self.steps_per_epoch[epoch])

    def work(self, step: int) -> list[Work]:
        """Return what all ranks train on in one step, in order."""
        epoch, place = self.locate(step)
        plan, routes = self.plan(epoch), self._route(epoch)
        found = []
        _, slots, consumers = plan.assignment.shape
        for slot in range(slots):
            for consumer in range(consumers):
                index = int(plan.assignment[place, slot, consumer])
                if index < 0:
                    continue
                micro_batch = _micro_batch(
                    plan, index, epoch, weight=float(plan.loss_weight[place, slot, consumer])
                )
                number = (step << 20) + len(found)
                target = int(routes[place, slot, consumer])
                found.append(Work(number, step, consumer, target, micro_batch))
        return found

    def micro_batch(self, epoch: int, index: int) -> MicroBatch:
        """Return one micro-batch of an epoch, wherever the plan places it."""
        return _micro_batch(self.plan(epoch), index, epoch, weight=1.0)

    def is_due(self, step: int) -> bool:
        """Whether held-out samples are measured after this step."""
        every = self._job.training.validation.every_steps
        if every is None or self._held_out is None:
            return False
        return (step + 1) % every == 0 or step + 1 == self.num_steps

    def held_out_work(self, step: int) -> list[Work]:
        """Return what all ranks measure after one step, in order; nothing when not due."""
        if not self.is_due(step):
            return []
        topology = self._job.training.topology
        num_targets = topology.num_ranks - topology.num_consumers
        return [
            Work(
                number=(step << 20) + (1 << 19) + index,
                step=step,
                consumer=index % topology.num_consumers,
                target=index % max(num_targets, 1),
                micro_batch=micro_batch,
            )
            for index, micro_batch in enumerate(self.held_out_batches)
        ]

    def stream(
        self, first_step: int, *, consumer: int | None = None, target: int | None = None
    ) -> Iterator[Work]:
        """Yield everything from a step to the end that one rank has part in, in order."""
        for step in range(first_step, self.num_steps):
            for work in (*self.work(step), *self.held_out_work(step)):
                if consumer in (None, work.consumer) and target in (None, work.target):
                    yield work

    def rounds(
        self, first_step: int, *, consumer: int | None = None, target: int | None = None
    ) -> Iterator[Work | None]:
        """Yield what each round holds for one rank, from a step to the end, None where nothing.

        Args:
            first_step: Step that the run goes on from.
            consumer: Consuming rank; or
            target: Target rank, from 0.
        """
        for step in range(first_step, self.num_steps):
            for works in (self.work(step), self.held_out_work(step)):
                yield from in_rounds(works, consumer=consumer, target=target)

    def counts(self, step: int) -> StepCounts:
        """Return the tokens of a step."""
        epoch, place = self.locate(step)
        plan = self.plan(epoch)
        placed, counts = plan.assignment[place], plan.loss_weight[place] > 0
        indices: NDArray[np.int64] = placed[counts]
        return StepCounts(
            real_tokens=int(plan.real_tokens[indices].sum()),
            token_slots=int(plan.slots[placed[placed >= 0]].sum()),
            supervised_tokens=int(plan.supervised_tokens[indices].sum()),
        )

    def ingredients(self) -> dict[str, str]:
        """Return what decides which samples a step holds, by name."""
        return self.plan(0).identity.ingredients | {STEPS: str(self.num_steps)}

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Length of each training sample."""
        return self._lengths

    @cached_property
    def samples(self) -> NDArray[np.int64]:
        """Training samples that the run reads: each epoch has the same unless steps are fewer."""
        plan = self.plan(0)
        micro_batches = np.repeat(np.arange(plan.num_micro_batches), np.diff(plan.offsets))
        read = np.isin(micro_batches, plan.assignment[: self.num_steps])
        return np.sort(plan.order[read]).astype(np.int64)

    @cached_property
    def held_out_samples(self) -> NDArray[np.int64]:
        """Held-out samples that are measured, spread evenly over the lengths."""
        assert self._held_out is not None
        usable = np.flatnonzero((self._held_out.lengths > 0) & (self._held_out.supervised > 1))
        ranked = usable[np.argsort(self._held_out.lengths[usable], kind="stable")]
        wanted = min(self._job.training.validation.num_samples, len(ranked))
        return np.sort(ranked[np.arange(wanted) * len(ranked) // max(wanted, 1)])

    @cached_property
    def held_out_batches(self) -> list[MicroBatch]:
        """Micro-batches of the held-out samples that are measured."""
        assert self._held_out is not None
        chosen = self.held_out_samples
        if not len(chosen):
            return []
        supervised = np.minimum(self._held_out.supervised[chosen], MOST_SUPERVISED)
        plan = plan_epoch(
            self._held_out.lengths[chosen],
            self._held_out_batching(supervised),
            epoch=0,
            seed=0,
            world_size=1,
            supervised=supervised,
        )
        return [
            _micro_batch(plan, index, 0, weight=1.0, samples=chosen)
            for index in range(plan.num_micro_batches)
        ]

    def _held_out_batching(self, supervised: NDArray[np.int64]) -> BatchingConfig:
        batching, most = self._job.batching, int(self.plan(0).num_anchors.max())
        # No gradients are kept: one with more anchors than any that is trained on fits as well.
        anchors = max(most, int(num_anchors(supervised, EVERY_POSITION).max()))
        return BatchingConfig(
            strategy="sorted",
            token_budget=batching.token_budget,
            anchor_budget=anchors,
            max_samples=batching.max_samples,
            anchors=EVERY_POSITION,
            max_length=self.plan(0).max_length,
            oversize="truncate",
            micro_batches_per_step=1,
        )

    def _route(self, epoch: int) -> NDArray[np.int64]:
        plan = self.plan(epoch)
        topology = self._job.training.topology
        num_targets = topology.num_ranks - topology.num_consumers
        with self._lock:
            if epoch not in self._routes:
                self._routes = {e: r for e, r in self._routes.items() if abs(e - epoch) <= 1}
                self._routes[epoch] = route_targets(
                    plan.assignment,
                    plan.costs(self._job.target_cost),
                    max(num_targets, 1),
                    topology.shard_target,
                )
            return self._routes[epoch]


def in_rounds(
    works: Sequence[Work], *, consumer: int | None = None, target: int | None = None
) -> Iterator[Work | None]:
    """Cut works into rounds, in order, of at most one for each consuming or target rank.

    Args:
        works: What all ranks do.
        consumer: Consuming rank whose share is wanted; or
        target: Target rank, from 0.
    """
    own = target if consumer is None else consumer
    assert own is not None
    current: dict[int, Work] = {}
    for work in works:
        rank = work.target if consumer is None else work.consumer
        if rank in current:
            yield current.get(own)
            current = {}
        current[rank] = work
    if current:
        yield current.get(own)


def _micro_batch(
    plan: EpochPlan,
    index: int,
    epoch: int,
    *,
    weight: float,
    samples: NDArray[np.int64] | None = None,
) -> MicroBatch:
    members = plan.micro_batch(index)
    chosen = (members if samples is None else samples[members]).tolist()
    return MicroBatch(
        rows=[chosen] if plan.packed else [[sample] for sample in chosen],
        padded_length=plan.padded_length(index),
        max_length=plan.max_length,
        weight=weight,
        epoch=epoch,
        held_out=samples is not None,
    )
