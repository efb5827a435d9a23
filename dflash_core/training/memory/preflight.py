"""Before step 1: the worst micro-batches are run once, so that memory runs out now or never."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dflash_core.config import FrozenModel
from dflash_core.draft.batch import DraftBatch
from dflash_core.training.batches.schedule import Epochs
from dflash_core.training.batches.types import MicroBatch
from dflash_core.training.features.source import FeatureSource
from dflash_core.training.flat import FlatGradients
from dflash_core.training.memory.guard import GIB, MemoryGuard, Run
from dflash_core.training.objectives.base import Objective
from dflash_core.training.ranks.groups import Ranks

__all__ = ["PREFLIGHT", "MemoryReport", "consumer_run", "preflight", "target_run"]

PREFLIGHT = "pre-flight"


class MemoryReport(FrozenModel):
    """What the worst micro-batches needed."""

    peak_bytes: int
    """Highest use on any rank."""
    limit_bytes: int
    """What a rank may use."""
    worst: tuple[str, ...]
    """The micro-batches that were run, in words."""
    cache_bytes: int = 0
    """What keeping all features on disk would take; 0 without a target."""

    @property
    def headroom(self) -> float:
        """Share of the memory that stays free."""
        return max(1 - self.peak_bytes / self.limit_bytes, 0.0)

    def __str__(self) -> str:
        """Return one line."""
        cache = f"; a feature cache would take {self.cache_bytes / GIB:,.2f} GiB of disk"
        return (
            f"{PREFLIGHT}: the {len(self.worst)} worst micro-batches ran; peak "
            f"{self.peak_bytes / 2**20:,.0f} MiB of {self.limit_bytes / 2**20:,.0f} MiB a rank, "
            f"headroom {self.headroom:.0%}{cache if self.cache_bytes else ''}"
        )


def preflight(epochs: Epochs, run: Run, ranks: Ranks, *, cache_bytes: int = 0) -> MemoryReport:
    """Run the first epoch's worst micro-batches on this rank; every rank calls this.

    Args:
        epochs: The plans.
        run: Does with a micro-batch what training will do, and leaves no trace.
        ranks: This process among the others.
        cache_bytes: What keeping all features on disk would take.

    Raises:
        TrainingError: A micro-batch does not fit; says which and what budget would.
    """
    plan = epochs.plan(0)
    guard = MemoryGuard.of(ranks, token_budget=plan.identity.config.token_budget)

    def in_step(micro_batch: MicroBatch) -> None:
        with ranks.together(f"the {PREFLIGHT}"):
            run(micro_batch)
        # Ranks of another role take another time: none waits for more than a part of the other's.
        ranks.meet(what=f"the {PREFLIGHT}")

    told = guard.run_worst(
        lambda index: epochs.micro_batch(0, index),
        in_step,
        rows=plan.rows,
        padded_lengths=plan.padded_lengths,
        num_anchors=plan.num_anchors,
    )
    highest = torch.tensor([guard.peak_bytes])
    if ranks.everyone is not None:
        with ranks.waiting("the other ranks", "the pre-flight"):
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=ranks.everyone)
    return MemoryReport(
        peak_bytes=int(highest),
        limit_bytes=guard.limit_bytes,
        worst=told,
        cache_bytes=cache_bytes,
    )


@contextmanager
def consumer_run(
    objective: Objective,
    features: Callable[[MicroBatch, Any], Tensor | None],
    gradients: FlatGradients,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> Iterator[Run]:
    """Yield what a consuming rank does with a micro-batch: forward, backward, optimizer.

    The optimizer's moments are there beforehand, as from the second step on. Weights stay as they
    are: it sees zero gradients at rate 0, and forgets them.

    Args:
        objective: What is trained.
        features: Gives features of a micro-batch, or as many zeros.
        gradients: Its gradients.
        optimizer: Its optimizer, before any step.
        device: Where it runs.
    """

    def update() -> None:
        gradients.zero()
        optimizer.step()

    def run(micro_batch: MicroBatch) -> None:
        batch = objective.prepare(micro_batch)
        batch = batch.to(device) if isinstance(batch, DraftBatch) else batch
        groups = torch.zeros(len(micro_batch.samples), dtype=torch.int64)
        objective.run(micro_batch, batch, features(micro_batch, batch), groups)
        update()

    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    update()
    yield run
    optimizer.state.clear()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def target_run(
    prepare: Callable[[MicroBatch], DraftBatch], source: FeatureSource, device: torch.device
) -> Run:
    """Return what a target rank does with a micro-batch."""

    def run(micro_batch: MicroBatch) -> None:
        source(micro_batch, prepare(micro_batch).to(device))

    return run
