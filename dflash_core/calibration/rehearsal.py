"""A few real steps of the training program, held against the model: what timing parts misses."""

import math
import shutil

import numpy as np
from numpy.typing import NDArray

from dflash_core.artifacts import content_digest
from dflash_core.config import changed
from dflash_core.corpus.store import TokenStore
from dflash_core.planning import EpochPlan, plan_epoch
from dflash_core.throughput import CostModel, Split, Workload
from dflash_core.throughput.prediction import timeline_of
from dflash_core.training.config import TopologyConfig, TrainingJob, ValidationConfig
from dflash_core.training.program import run_job
from dflash_core.training.ranks.groups import Ranks
from dflash_core.training.telemetry.status import read_metrics

__all__ = ["colocated", "pace_error", "rehearse", "tempered", "trimmed_ratio"]

WARM_UP_STEPS = 2
SECONDS = 8.0
NUM_STEPS = (8, 60)
TRIMMED = 0.2
BLOCKS = 5
USUAL = 0.05  # what timing parts misses, as far as machines are known
UNKNOWN = 100.0  # the error of what a few steps show: they count for nothing


def colocated(job: TrainingJob, *, max_steps: int | None = None) -> TrainingJob:
    """Return the job with every rank running both models, for measuring and nothing else."""
    training = job.training
    plain = {
        "topology": TopologyConfig(
            num_ranks=training.topology.num_ranks,
            queue_depth=training.topology.queue_depth,
            shard_target=training.topology.shard_target,
            shard_trained=training.topology.shard_trained,
        ),
        "preflight": False,
        "validation": ValidationConfig(),
        "resume": False,
        "epochs": 1,
        "checkpoint_every_steps": 10**9,
        **({} if max_steps is None else {"max_steps": max_steps}),
    }
    return changed(job, {"training": changed(training, plain), "held_out_store": None})


def rehearse(
    job: TrainingJob, cost: CostModel, ranks: Ranks, *, block_size: int
) -> tuple[float, float]:
    """Train a few shuffled steps; return measured over modelled time, and its standard error.

    Args:
        job: The run; its folder takes the rehearsal's own, which is removed afterwards.
        cost: What timing the parts gave.
        ranks: This process among the others.
        block_size: Block size of the drafter.
    """
    batching = changed(job.batching, {"strategy": "random", "mixing": "diverse", "edges": None})
    store = TokenStore.open(job.store)
    plan = plan_epoch(
        store.lengths,
        batching,
        epoch=0,
        seed=job.training.seed,
        world_size=job.training.topology.num_ranks,
        supervised=store.supervised,
        cost=job.consumer_cost,
    )
    ends = _modelled(plan, cost, ranks.world_size, block_size)
    step_s = ends[-1] / plan.num_steps
    steps = ranks.agree(int(np.clip(SECONDS / step_s, *NUM_STEPS)), what="the rehearsal")
    if plan.num_steps <= WARM_UP_STEPS:
        return 1.0, UNKNOWN  # nothing is left to compare after warming up
    run_dir = job.run_dir / "rehearsal"
    chosen = colocated(job, max_steps=min(steps, plan.num_steps))
    # A feature cache of its own: in the run's, some samples of the first epoch would be found.
    # Other runs that share its folder may rehearse at the same time.
    place = content_digest(str(job.run_dir.resolve()))[:16]
    kept = job.training.cache.path / f".rehearsal-{place}"
    cache = changed(job.training.cache, {"path": kept})
    chosen = changed(
        chosen,
        {
            "batching": batching,
            "run_dir": run_dir,
            "training": changed(chosen.training, {"cache": cache}),
        },
    )
    if ranks.is_first:
        for folder in (run_dir, kept):
            shutil.rmtree(folder, ignore_errors=True)
        run_dir.mkdir(parents=True)
    ranks.meet(what="the rehearsal")
    try:
        run_job(chosen, ranks)
    finally:
        if ranks.is_first:
            shutil.rmtree(kept, ignore_errors=True)
    found = 0.0, 0.0
    if ranks.is_first:
        lines = read_metrics(run_dir)
        seconds = np.array([line["step_s"] for line in lines[WARM_UP_STEPS:]])
        modelled = np.diff(ends[WARM_UP_STEPS - 1 : len(lines)])
        ratio, error = trimmed_ratio(seconds, modelled)
        found = ratio, max(error, pace_error(seconds, modelled, blocks=BLOCKS))
        shutil.rmtree(run_dir, ignore_errors=True)
    ratio, error = (ranks.agree(round(value * 1e6), what="the rehearsal") / 1e6 for value in found)
    return ratio, error


def trimmed_ratio(
    measured: NDArray[np.float64], modelled: NDArray[np.float64]
) -> tuple[float, float]:
    """Return the ratio of sums over the middle steps, and its standard error as a share of it.

    The fifths of the steps with the largest and the smallest ratio are left out: what disturbs a
    few of the rehearsal's steps says nothing about the run.
    """
    ratios = measured / modelled
    cut = int(TRIMMED * ratios.size)
    middle = np.argsort(ratios, kind="stable")[cut : ratios.size - cut]
    ratio = float(measured[middle].sum() / modelled[middle].sum())
    clipped = np.clip(ratios, ratios[middle].min(), ratios[middle].max())
    # Tukey and McLaughlin's standard error of a trimmed mean.
    error = float(clipped.std()) / ((1 - 2 * TRIMMED) * math.sqrt(ratios.size))
    return ratio, error / ratio


def pace_error(
    measured: NDArray[np.float64], modelled: NDArray[np.float64], *, blocks: int
) -> float:
    """Return the standard error of the machine's pace, as a share of it.

    A machine that others share changes its pace over seconds, so that neighbouring times err
    alike: the spread of the means of blocks of them counts.

    Args:
        measured: Seconds, in the order in which they were taken.
        modelled: What the model says of them.
        blocks: Consecutive parts to compare, at least 2; fewer times than that say nothing.
    """
    if blocks < 2 or measured.size < blocks:
        return UNKNOWN
    pairs = zip(np.array_split(measured, blocks), np.array_split(modelled, blocks), strict=True)
    paces = np.array([one.sum() / other.sum() for one, other in pairs])
    return float(paces.std(ddof=1) / paces.mean() / math.sqrt(blocks))


def tempered(ratio: float, error: float) -> tuple[float, float]:
    """Weigh a rehearsal against what is usual; return the correction and its standard error.

    Where seconds of a rehearsal and seconds of timing parts saw the machine at different paces,
    most of their ratio is the machine's and not the model's. The two are weighed by their
    variances, as for normal errors.

    Example:
        >>> [round(value, 3) for value in tempered(1.4, 0.0)]
        [1.4, 0.0]
        >>> [round(value, 3) for value in tempered(1.4, 0.1)]
        [1.07, 0.045]
    """
    weight = USUAL**2 / (USUAL**2 + error**2)
    return ratio**weight, math.sqrt(weight) * error


def _modelled(plan: EpochPlan, cost: CostModel, num_ranks: int, block_size: int) -> np.ndarray:
    work = Workload.of_plan(
        plan, block_size=block_size, attends_documents_only=cost.attends_documents_only
    )
    return timeline_of(plan, work, cost, Split(num_ranks=num_ranks)).step_ends
