"""Measure what micro-batches cost here: real target forwards and drafter steps, all ranks busy.

``torchrun --nproc-per-node N -m dflash_core.calibration.program --config job.json --out FILE``

Rounds over a grid of shapes go on until the time is up, each with other samples, so that every
shape is as new to caches and allocators as in training, and a disturbance hits no shape alone.
"""

import argparse
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from dflash_core.artifacts import atomic_write, content_digest
from dflash_core.calibration.rehearsal import colocated, pace_error, rehearse, tempered
from dflash_core.calibration.shapes import Shape, calibration_shapes
from dflash_core.calibration.transfer_timing import time_transfer
from dflash_core.config import changed
from dflash_core.corpus.store import TokenStore
from dflash_core.draft.batch import DraftBatch
from dflash_core.errors import ConfigError
from dflash_core.planning.anchors import num_anchors
from dflash_core.target.loading import target_digest
from dflash_core.throughput import CostModel, Fingerprint, Measurement, Workload, fit_role
from dflash_core.throughput.cost import Role
from dflash_core.training.config import TrainingJob
from dflash_core.training.entry import read_job, run_program
from dflash_core.training.features.cache import FeatureCache
from dflash_core.training.features.lockstep import load_for_ranks
from dflash_core.training.features.source import (
    CachedFeatures,
    FeatureSource,
    OnlineFeatures,
    feature_shape,
    timed,
)
from dflash_core.training.flat import FlatGradients
from dflash_core.training.memory.guard import MemoryGuard
from dflash_core.training.memory.preflight import consumer_run
from dflash_core.training.objectives.drafter import DraftObjective
from dflash_core.training.optimizer import build_optimizer
from dflash_core.training.ranks.groups import Ranks, device_of
from dflash_core.training.ranks.lane import wait_for_device

__all__ = ["calibrate", "fingerprint", "hardware_of", "main", "versions_here"]

SECONDS = 12.0
ROUNDS = (2, 12)
FEW_ANCHORS = 0.25
STEP_REPEATS = 7
ROLES: tuple[Role, ...] = ("prefetch", "target", "read", "draft")

Times = tuple[float, float, float, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Calibrate on this rank; the first one writes the cost model."""
    parser = argparse.ArgumentParser(prog="python -m dflash_core.calibration.program")
    parser.add_argument("--config", type=Path, required=True, help="the run's job.json")
    parser.add_argument("--out", type=Path, required=True, help="cost model, JSON")
    arguments = parser.parse_args(argv)
    try:
        job = colocated(read_job(arguments.config))
    except ConfigError as error:
        sys.stderr.write(f"ConfigError: {error}\n")
        return error.exit_code

    def work(ranks: Ranks) -> None:
        model = calibrate(job, ranks)
        if ranks.is_first:
            text = model.model_dump_json(indent=1, exclude_defaults=True)
            atomic_write(arguments.out, text + "\n")

    return run_program(job, work)


def calibrate(job: TrainingJob, ranks: Ranks) -> CostModel:
    """Time a grid of shapes on every rank at once, fit the cost model, and rehearse.

    Args:
        job: The run to predict; its store gives the samples.
        ranks: This process among the others.

    Raises:
        CalibrationError: The shapes cannot tell the terms apart, or all times are equal.
        TrainingError: The largest shapes need more memory than there is.
    """
    job = colocated(job)
    with _scratch(job) as scratch, ranks.together("calibration"):
        bench = _Bench(job, ranks, scratch)
        bench.try_out()
        measurements, jitter, rounds = bench.measure()
        reduce_s, step_s = bench.step_times()
    latency_s, per_token_s = time_transfer(bench.num_features, bench.dtype, ranks)
    model = CostModel(
        prefetch=fit_role(measurements, "prefetch"),
        target=fit_role(measurements, "target"),
        read=fit_role(measurements, "read") if scratch else None,
        draft=fit_role(measurements, "draft"),
        step_s=step_s,
        reduce_s=reduce_s,
        jitter=jitter,
        transfer_latency_s=latency_s,
        transfer_s_per_token=per_token_s,
        overlaps=_overlaps(job, ranks),
        fingerprint=fingerprint(job),
    )
    block_size = bench.block_size
    del bench  # its models would stand beside the rehearsal's
    ratio, error = rehearse(job, model, ranks, block_size=block_size)
    error = math.hypot(error, _pace_error(measurements, model, rounds=rounds))
    correction, error = tempered(ratio, error)
    return changed(model, {"correction": correction, "correction_error": error})


def _pace_error(measurements: list[Measurement], model: CostModel, *, rounds: int) -> float:
    """Return how unsure the machine's pace was while parts were timed."""
    measured, modelled = [], []
    for role, fit in (("target", model.target), ("draft", model.draft)):
        used = [m for m in measurements if m.role == role]
        measured.append([m.seconds for m in used])
        modelled.append(fit.coefficients.seconds(Workload.of_measurements(used).amounts))
    return pace_error(np.sum(measured, axis=0), np.sum(modelled, axis=0), blocks=rounds)


def fingerprint(job: TrainingJob) -> Fingerprint:
    """Return what a calibration of this job on this machine is good for."""
    training = job.training
    return Fingerprint(
        hardware=hardware_of(device_of(training)),
        num_ranks=training.topology.num_ranks,
        threads_per_rank=training.threads_per_rank,
        target=target_digest(job.target.path),
        draft=content_digest(
            job.draft.model_dump(mode="json"),
            job.loss.model_dump(mode="json"),
            job.target.layer_ids,
        ),
        block_size=job.draft.block_size,
        precision=f"{job.target.dtype}/{training.precision}",
        attention=job.target.attention,
        shard_target=training.topology.shard_target,
        shard_trained=training.topology.shard_trained,
        features=training.features,
        versions=versions_here(),
    )


def hardware_of(device: torch.device) -> str:
    """Return the name of a device: the GPU's, or the processor's and how many of them."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()


def versions_here() -> str:
    """Return the versions of the libraries that do the work."""
    return f"torch {torch.__version__}, transformers {transformers.__version__}"


@contextmanager
def _scratch(job: TrainingJob) -> Iterator[Path | None]:
    """Yield a folder on the feature cache's own disk, if the run has one."""
    if job.training.features == "online":
        yield None
        return
    job.training.cache.path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".timing-", dir=job.training.cache.path) as folder:
        yield Path(folder)


class _Bench:
    """The models of a rank, to be timed; features are kept in the scratch folder, if given."""

    def __init__(self, job: TrainingJob, ranks: Ranks, scratch: Path | None) -> None:
        self._job = job
        self._ranks = ranks
        self._store = TokenStore.open(job.store)
        target = load_for_ranks(job.target, ranks)
        self._objective = DraftObjective(job, target, self._store, None, ranks)
        online = OnlineFeatures(target, packed=False, final_hidden=job.loss.distils)
        self._source: FeatureSource = online
        self._cache: FeatureCache | None = None
        parameters = list(self._objective.module.parameters())
        self._gradients = FlatGradients(parameters)
        self._optimizer = build_optimizer(parameters, job.training.optimizer)
        rule = job.batching.anchors
        fewer = {
            "anchors_per_supervised_token": rule.anchors_per_supervised_token * FEW_ANCHORS,
            "min_anchors": 1,
        }
        batching = changed(job.batching, {"anchors": changed(rule, fewer)})
        self._layouts = {
            False: self._objective.prepare,
            True: replace(self._objective.prepare, job=changed(job, {"batching": batching})),
        }
        self.block_size = self._objective.drafter.spec.block_size
        self.num_features, self.dtype = feature_shape(target, job.loss)
        if scratch is not None:
            limit = job.batching.max_length or job.batching.token_budget
            lengths = np.minimum(self._store.lengths, limit)
            self._cache = FeatureCache(
                scratch, lengths, num_features=self.num_features, dtype=self.dtype
            )
            self._source = CachedFeatures(
                (self._cache, None), lambda: online, ranks.device, final_hidden=job.loss.distils
            )

    def try_out(self) -> None:
        """Run the largest shapes as the pre-flight does, before a rank could be killed for them.

        Raises:
            TrainingError: One needs more memory than there is.
        """
        every = [shape.micro_batch for shape in self._shapes(np.random.default_rng(0))]
        rule, supervised = self._job.batching.anchors, self._store.supervised
        guard = MemoryGuard.of(self._ranks, token_budget=self._job.batching.token_budget)
        with consumer_run(
            self._objective, self._source, self._gradients, self._optimizer, self._ranks.device
        ) as run:
            guard.run_worst(
                every.__getitem__,
                run,
                rows=np.array([len(batch.rows) for batch in every]),
                padded_lengths=np.array([batch.padded_length for batch in every]),
                num_anchors=np.array(
                    [num_anchors(supervised[batch.samples], rule).sum() for batch in every]
                ),
            )

    def measure(self) -> tuple[list[Measurement], float, int]:
        """Time rounds of shapes; return the measurements, the jitter between ranks, the rounds."""
        rng = np.random.default_rng(0)
        taken: list[tuple[Shape, DraftBatch]] = []
        seconds: list[Times] = []
        start, number = time.perf_counter(), 0
        for number in range(1 + ROUNDS[1]):
            shapes = self._shapes(rng)
            found = [self._time(shape) for shape in shapes]
            if number == 0:
                continue  # warms up
            taken += [(shape, batch) for shape, (batch, _) in zip(shapes, found, strict=True)]
            seconds += [times for _, times in found]
            enough = time.perf_counter() - start > SECONDS and number >= ROUNDS[0]
            if self._ranks.agree(int(enough), what="calibration"):
                break
        every = self._share(seconds)
        means = every.mean(axis=0)
        measurements = [
            _measurement(shape, batch, self.block_size, role, float(means[index, place]))
            for index, (shape, batch) in enumerate(taken)
            for place, role in enumerate(ROLES)
            if role != "read" or self._cache is not None
        ]
        return measurements, _jitter(every.sum(axis=2)), number

    def _shapes(self, rng: np.random.Generator) -> list[Shape]:
        lengths, supervised = self._store.lengths, self._store.supervised
        return calibration_shapes(lengths, self._job.batching, supervised=supervised, rng=rng)

    def _time(self, shape: Shape) -> tuple[DraftBatch, Times]:
        """Return the batch and the seconds of each role on this rank."""
        self._ranks.meet(what="calibration")
        begin = time.perf_counter()
        batch = self._layouts[shape.few_anchors](shape.micro_batch)
        prefetch_s = time.perf_counter() - begin
        on_device = batch.to(self._ranks.device)
        if self._cache is not None:
            self._cache.forget(shape.micro_batch.samples)
        features_MF, target_s = timed(self._source, shape.micro_batch, on_device)
        read_s = 0.0
        if self._cache is not None:
            features_MF, read_s = timed(self._source, shape.micro_batch, on_device)
        begin = time.perf_counter()
        groups = torch.zeros(len(shape.micro_batch.samples), dtype=torch.int64)
        self._objective.run(shape.micro_batch, on_device, features_MF, groups)
        return batch, (prefetch_s, target_s, read_s, time.perf_counter() - begin)

    def _share(self, seconds: list[Times]) -> NDArray[np.float64]:
        """Return every rank's seconds, shape ``(num_ranks, num_shapes, num_roles)``."""
        every = torch.zeros(self._ranks.world_size, len(seconds), len(ROLES), dtype=torch.float64)
        every[self._ranks.rank] = torch.tensor(seconds, dtype=torch.float64)
        return self._ranks.add(every.to(self._ranks.device), what="calibration").cpu().numpy()

    def step_times(self) -> tuple[float, float]:
        """Return median seconds of what every step does once: sum gradients; clip and update."""
        sums = torch.zeros(self._objective.num_sums, dtype=torch.float64)
        times = []
        for _ in range(STEP_REPEATS + 1):
            self._ranks.meet(what="calibration")
            self._gradients.zero()
            begin = time.perf_counter()
            self._ranks.add(sums.to(self._ranks.device), what="calibration")
            self._gradients.add_up(self._ranks, what="calibration")
            wait_for_device(self._ranks.device)
            reduced = time.perf_counter()
            self._gradients.normalise(1.0, 1.0)
            self._optimizer.step()
            wait_for_device(self._ranks.device)
            times.append((reduced - begin, time.perf_counter() - reduced))
        mine = torch.tensor(np.median(times[1:], axis=0))
        total = self._ranks.add(mine.to(self._ranks.device), what="calibration")
        reduce_s, step_s = (total / self._ranks.world_size).tolist()
        return reduce_s, step_s


def _measurement(
    shape: Shape, batch: DraftBatch, block_size: int, role: str, seconds: float
) -> Measurement:
    rows, padded_length = batch.input_ids_BT.shape
    lengths = torch.bincount(
        batch.document_ids_BT[batch.document_ids_BT >= 0], minlength=batch.num_documents
    )
    return Measurement(
        role=role,  # type: ignore[arg-type]
        rows=rows,
        padded_length=padded_length,
        real_tokens=int(lengths.sum()),
        anchor_tokens=batch.num_anchors * block_size,
        anchor_contexts=int(lengths[batch.anchor_documents_N].sum()) * block_size,
        seconds=max(seconds, 1e-9),
        cell=shape.cell,
    )


def _jitter(seconds: NDArray[np.float64]) -> float:
    """Return the spread between ranks as a share, from how much longer the slowest took.

    Args:
        seconds: Of each rank and shape, shape ``(num_ranks, num_shapes)``.
    """
    num_ranks = seconds.shape[0]
    if num_ranks == 1:
        return 0.0
    excess = float(np.mean(seconds.max(axis=0) / seconds.mean(axis=0)) - 1)
    return excess / _expected_maximum(num_ranks)


def _expected_maximum(count: int) -> float:
    """Return the expected largest of independent standard normal numbers."""
    x = np.linspace(-8, 8, 4001)
    below = np.array([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in x])
    density = np.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)
    return float(np.trapezoid(x * count * density * below ** (count - 1), x))


def _overlaps(job: TrainingJob, ranks: Ranks) -> bool:
    """Whether a core is left to every rank for reading ahead."""
    wanted = ranks.world_size * (job.training.threads_per_rank + 1)
    return ranks.device.type == "cuda" or len(os.sched_getaffinity(0)) >= wanted


def _processor() -> str:
    """Return the processor's name and how many of them there are."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    return f"{name} x{torch.multiprocessing.cpu_count()}"


if __name__ == "__main__":
    sys.exit(main())
