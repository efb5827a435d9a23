"""Before step 1: the worst micro-batches are run once, so that memory runs out now or never.

Each first with a quarter of its rows: from what that needed it is known whether the whole would
fit, before a CPU's OOM killer, which raises nothing, could end the rank.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dflash_core.config import FrozenModel
from dflash_core.draft.batch import DraftBatch
from dflash_core.errors import TrainingError
from dflash_core.throughput import fitting_budget, worst_micro_batches
from dflash_core.training.epochs import Epochs
from dflash_core.training.features import FeatureSource
from dflash_core.training.flat import FlatGradients
from dflash_core.training.memory import memory_limit_bytes, used_memory_bytes
from dflash_core.training.monitor import peak_memory_bytes
from dflash_core.training.objective import MicroBatch, Objective
from dflash_core.training.ranks import Ranks

__all__ = ["PREFLIGHT", "MemoryReport", "consumer_run", "preflight", "target_run"]

Run = Callable[[MicroBatch], None]
SAFE_SHARE = 0.95
GIB = 2**30
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
    device, plan = ranks.device, epochs.plan(0)
    token_budget = plan.identity.config.token_budget
    limit = memory_limit_bytes(device, sharing=_local_ranks(ranks))
    told = []
    for index, reason in worst_micro_batches(plan).items():
        rows, length = int(plan.rows[index]), plan.padded_length(index)
        words = f"{rows} x {length:,} tokens, largest in {reason}"
        _run_safely(epochs.micro_batch(0, index), run, device, words, limit, token_budget)
        told.append(words)
    highest = torch.tensor([peak_memory_bytes(device)])
    if ranks.everyone is not None:
        with ranks.waiting("the other ranks", "the pre-flight"):
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=ranks.everyone)
    return MemoryReport(
        peak_bytes=int(highest), limit_bytes=limit, worst=tuple(told), cache_bytes=cache_bytes
    )


def _run_safely(
    micro_batch: MicroBatch,
    run: Run,
    device: torch.device,
    words: str,
    limit: int,
    token_budget: int,
) -> None:
    fixed = used_memory_bytes(device)
    whole = len(micro_batch.rows)
    part = max(whole // 4, 1)
    needed = limit
    try:
        if part < whole:
            run(replace(micro_batch, rows=micro_batch.rows[:part]))
            needed = fixed + (max(peak_memory_bytes(device) - fixed, 0) * whole) // part
            if device.type == "cpu" and needed > SAFE_SHARE * limit:
                raise _too_large(words, needed, fixed, limit, token_budget)
        run(micro_batch)
    except torch.cuda.OutOfMemoryError as error:
        raise _too_large(words, max(needed, limit), fixed, limit, token_budget) from error


def _too_large(words: str, needed: int, fixed: int, limit: int, token_budget: int) -> TrainingError:
    fits = fitting_budget(
        token_budget,
        peak_bytes=needed,
        fixed_bytes=fixed,
        limit_bytes=int(SAFE_SHARE * limit),
    )
    if fits == 0:
        return TrainingError(
            f"models, gradients and optimizer take {fixed / GIB:.1f} GiB before the micro-batch of "
            f"{words}, and a rank may use {limit / GIB:.1f} GiB; run fewer ranks on this machine "
            "with training.topology.num_ranks, or use one with more memory"
        )
    return TrainingError(
        f"the micro-batch of {words} needs about {needed / GIB:.1f} GiB and a rank may use "
        f"{limit / GIB:.1f} GiB; set batching.token_budget to at most {fits:,}"
    )


def consumer_run(
    objective: Objective,
    features: Callable[[MicroBatch, Any], Tensor | None],
    gradients: FlatGradients,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> Run:
    """Return what a consuming rank does with a micro-batch: forward, backward, optimizer.

    Weights stay as they are: the optimizer sees zero gradients at rate 0, and forgets them.

    Args:
        objective: What is trained.
        features: Gives features of a micro-batch, or as many zeros.
        gradients: Its gradients.
        optimizer: Its optimizer, before any step.
        device: Where it runs.
    """

    def run(micro_batch: MicroBatch) -> None:
        batch = objective.prepare(micro_batch)
        batch = batch.to(device) if isinstance(batch, DraftBatch) else batch
        groups = torch.zeros(len(micro_batch.samples), dtype=torch.int64)
        objective.run(micro_batch, batch, features(micro_batch, batch), groups)
        gradients.zero()
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
        optimizer.state.clear()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    return run


def target_run(
    prepare: Callable[[MicroBatch], DraftBatch], source: FeatureSource, device: torch.device
) -> Run:
    """Return what a target rank does with a micro-batch."""

    def run(micro_batch: MicroBatch) -> None:
        source(micro_batch, prepare(micro_batch).to(device))

    return run


def _local_ranks(ranks: Ranks) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))
