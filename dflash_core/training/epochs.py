"""All epochs of a run as plans: known before the first step, alike on every rank."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_core.artifacts import content_digest
from dflash_core.corpus.store import TokenStore
from dflash_core.planning import EpochPlan, plan_epoch
from dflash_core.training.config import TrainingJob
from dflash_core.training.objective import MicroBatch

__all__ = ["Epochs", "StepCounts"]


@dataclass(frozen=True)
class StepCounts:
    """Tokens of one step over all ranks.

    Attributes:
        real_tokens: Tokens of samples.
        token_slots: Positions, padding included.
        supervised_tokens: Tokens that carry loss.
    """

    real_tokens: int
    token_slots: int
    supervised_tokens: int


class Epochs:
    """The run's plans, made when their epoch comes and counted before.

    Args:
        job: The run.
        store: Its samples.

    Attributes:
        steps_per_epoch: Steps of each epoch.
        num_steps: Steps of the run: all epochs, or ``training.max_steps``.
    """

    def __init__(self, job: TrainingJob, store: TokenStore) -> None:
        self._job = job
        self._lengths = store.lengths
        self._supervised = store.supervised
        self._cached: tuple[int, EpochPlan] | None = None
        epochs = range(job.training.epochs)
        self.steps_per_epoch = [self.plan(epoch).num_steps for epoch in epochs]
        total = sum(self.steps_per_epoch)
        self.num_steps = min(total, job.training.max_steps or total)

    def plan(self, epoch: int) -> EpochPlan:
        """Return the plan of an epoch."""
        if self._cached is None or self._cached[0] != epoch:
            plan = plan_epoch(
                self._lengths,
                self._job.batching,
                epoch=epoch,
                seed=self._job.training.seed,
                world_size=self._job.training.topology.num_consumers,
                supervised=self._supervised,
            )
            self._cached = (epoch, plan)
        return self._cached[1]

    def micro_batches(self, epoch: int, step: int, consumer: int) -> Iterator[MicroBatch]:
        """Yield what one rank runs in one step, in order."""
        plan = self.plan(epoch)
        for slot in range(plan.assignment.shape[1]):
            index = int(plan.assignment[step, slot, consumer])
            if index >= 0:
                samples = plan.micro_batch(index).tolist()
                yield MicroBatch(
                    rows=[samples] if plan.packed else [[sample] for sample in samples],
                    padded_length=plan.padded_length(index),
                    max_length=plan.max_length,
                    weight=float(plan.loss_weight[step, slot, consumer]),
                    epoch=epoch,
                )

    def counts(self, epoch: int, step: int) -> StepCounts:
        """Return the tokens of a step."""
        plan = self.plan(epoch)
        placed = plan.assignment[step]
        indices: NDArray[np.int64] = placed[placed >= 0]
        return StepCounts(
            real_tokens=int(plan.real_tokens[indices].sum()),
            token_slots=int(plan.slots[indices].sum()),
            supervised_tokens=int(plan.supervised_tokens[indices].sum()),
        )

    def ingredients(self) -> dict[str, str]:
        """Return what decides which samples a step holds, by name."""
        job = self._job
        return {
            "lengths": content_digest(self._lengths.tobytes()),
            "supervised tokens": content_digest(self._supervised.tobytes()),
            "batching": content_digest(job.batching.model_dump(mode="json")),
            "seed": str(job.training.seed),
            "number of steps": str(self.num_steps),
            "plan": self.plan(0).content_hash,
        }
