"""Measure what micro-batches cost here: real target forwards and drafter steps, all ranks busy.

``torchrun --nproc-per-node N -m dflash_core.training.calibration --config job.json --out FILE``
"""

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers

from dflash_core.artifacts import atomic_write, content_digest
from dflash_core.corpus.store import Sample, TokenStore
from dflash_core.errors import CalibrationError, DFlashError
from dflash_core.planning.anchors import num_anchors
from dflash_core.target.loading import load_target, target_digest
from dflash_core.throughput.cost import CostModel, Fingerprint, Measurement
from dflash_core.throughput.fitting import fit_role
from dflash_core.training.config import TrainingJob
from dflash_core.training.draft_objective import DraftObjective
from dflash_core.training.features import OnlineFeatures, timed
from dflash_core.training.flat import FlatGradients
from dflash_core.training.objective import MicroBatch
from dflash_core.training.optimizer import build_optimizer
from dflash_core.training.ranks import Ranks, join_ranks

__all__ = ["calibrate", "fingerprint", "main", "measured_shapes"]

REPEATS = 5
LENGTH_QUANTILES = (0.1, 0.5, 0.9, 1.0)
SUPERVISED_SHARES = (0.2, 0.8)


def main(argv: Sequence[str] | None = None) -> int:
    """Calibrate on this rank; the first one writes the cost model."""
    parser = argparse.ArgumentParser(prog="python -m dflash_core.training.calibration")
    parser.add_argument("--config", type=Path, required=True, help="the run's job.json")
    parser.add_argument("--out", type=Path, required=True, help="cost model, JSON")
    arguments = parser.parse_args(argv)
    job = TrainingJob.model_validate_json(arguments.config.read_bytes())
    try:
        with join_ranks(job.training) as ranks:
            model = calibrate(job, ranks)
    except DFlashError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return error.exit_code
    if ranks.is_first:
        atomic_write(arguments.out, model.model_dump_json(indent=1) + "\n")
    return 0


def calibrate(job: TrainingJob, ranks: Ranks) -> CostModel:
    """Time a grid of shapes on every rank at once and fit the cost model.

    Args:
        job: The run to predict; its store says which lengths matter.
        ranks: This process among the others.

    Raises:
        CalibrationError: The shapes cannot tell the terms apart, or all times are equal.
    """
    lengths = TokenStore.open(job.store).lengths
    shapes = measured_shapes(lengths, job.batching.token_budget)
    store = _MadeSamples(job, shapes)
    target = load_target(job.target, device=ranks.device)
    objective = DraftObjective(job, target, store, None)  # type: ignore[arg-type]  (read by index)
    source = OnlineFeatures(target, packed=False)
    gradients = FlatGradients(list(objective.module.parameters()))
    block_size = objective.drafter.spec.block_size
    measurements: list[Measurement] = []
    for shape, (rows, length, share) in enumerate(shapes):
        batch = MicroBatch([[shape]] * rows, length, length, weight=1.0, epoch=0)
        target_s, draft_s = _time(objective, source, batch, ranks)
        supervised = np.array([round(length * share)])
        anchors = rows * int(num_anchors(supervised, job.batching.anchors)[0])
        facts = {
            "rows": rows,
            "padded_length": length,
            "real_tokens": rows * length,
            "anchor_tokens": anchors * block_size,
            "anchor_contexts": anchors * block_size * length,
            "cell": shape,
        }
        measurements.append(Measurement(role="target", seconds=target_s, **facts))
        measurements.append(Measurement(role="draft", seconds=draft_s, **facts))
    return CostModel(
        target=fit_role(measurements, "target"),
        draft=fit_role(measurements, "draft"),
        step_s=_time_step(objective, gradients, job, ranks),
        fingerprint=fingerprint(job, ranks.device),
    )


def measured_shapes(
    lengths: "np.ndarray[tuple[int], np.dtype[np.int64]]", token_budget: int
) -> list[tuple[int, int, float]]:
    """Return the grid: (rows, padded length, supervised share), small micro-batches included.

    Args:
        lengths: Sequence lengths in tokens, shape ``(num_samples,)``.
        token_budget: Most token slots of a micro-batch.

    Raises:
        CalibrationError: There is no sample to take lengths from.
    """
    if lengths.size == 0:
        raise CalibrationError("there is no sample to calibrate with; give a store that holds some")
    chosen = sorted({int(np.quantile(lengths, q, method="nearest")) for q in LENGTH_QUANTILES})
    chosen = [min(length, token_budget) for length in chosen]
    if len(set(chosen)) == 1:  # all samples of one length: shorter rows separate the terms
        chosen = [max(chosen[0] // 4, 1), max(chosen[0] // 2, 1), chosen[0]]
    shapes = []
    for length in sorted(set(chosen)):
        most = max(token_budget // length, 1)
        for rows in sorted({1, max(most // 2, 1), most}):
            shapes.extend((rows, length, share) for share in SUPERVISED_SHARES)
    return shapes


def fingerprint(job: TrainingJob, device: torch.device) -> Fingerprint:
    """Return what a calibration of this job on this machine is good for."""
    training = job.training
    return Fingerprint(
        hardware=torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        num_ranks=training.topology.num_ranks,
        threads_per_rank=training.threads_per_rank,
        target=target_digest(job.target.path),
        draft=content_digest(
            job.draft.model_dump(mode="json"),
            job.loss.model_dump(mode="json"),
            job.target.layer_ids,
        ),
        precision=f"{job.target.dtype}/{training.precision}",
        attention=job.target.attention,
        versions=f"torch {torch.__version__}, transformers {transformers.__version__}",
    )


class _MadeSamples:
    """One random sample for each shape: what it says does not matter, its length does."""

    def __init__(self, job: TrainingJob, shapes: Sequence[tuple[int, int, float]]) -> None:
        source = TokenStore.open(job.store)[0].input_ids
        self._samples = []
        for index, (_, length, share) in enumerate(shapes):
            mask = np.zeros(length, dtype=np.bool_)
            mask[length - round(length * share) :] = True
            ids = np.resize(source, length).astype(np.int32)
            self._samples.append(Sample(ids, mask, "calibration", f"calibration-{index}"))

    def __getitem__(self, index: int) -> Sample:
        return self._samples[index]


def _time(
    objective: DraftObjective, source: OnlineFeatures, batch: MicroBatch, ranks: Ranks
) -> tuple[float, float]:
    """Return median seconds of target and drafter, averaged over the ranks."""
    _run(objective, source, batch, ranks)
    targets, drafts = [], []
    for _ in range(REPEATS):
        ranks.meet(what="calibration")
        target_s, draft_s = _run(objective, source, batch, ranks)
        targets.append(target_s)
        drafts.append(draft_s)
    medians = torch.tensor(
        [statistics.median(targets), statistics.median(drafts)],
        dtype=torch.float64,
        device=ranks.device,
    )
    target_s, draft_s = (ranks.add(medians, what="calibration") / ranks.num_consumers).tolist()
    return target_s, draft_s


def _run(
    objective: DraftObjective, source: OnlineFeatures, micro_batch: MicroBatch, ranks: Ranks
) -> tuple[float, float]:
    """Return seconds of target and drafter for one micro-batch."""
    begin = time.perf_counter()
    laid_out = objective.prepare(micro_batch)
    # Reading ahead costs a CPU rank what it costs; beside a GPU it is hidden.
    prepare_s = 0.0 if ranks.device.type == "cuda" else time.perf_counter() - begin
    features_MF, target_s = timed(source, micro_batch, laid_out.to(ranks.device))
    middle = time.perf_counter()
    groups = torch.zeros(len(micro_batch.samples), dtype=torch.int64)
    objective.run(micro_batch, laid_out.to(ranks.device), features_MF, groups)
    return target_s, prepare_s + time.perf_counter() - middle


def _time_step(
    objective: DraftObjective, gradients: FlatGradients, job: TrainingJob, ranks: Ranks
) -> float:
    """Return median seconds of what every step does once: reduce, clip, update."""
    parameters = list(objective.module.parameters())
    optimizer = build_optimizer(parameters, job.training.optimizer)
    times = []
    for _ in range(REPEATS + 1):
        ranks.meet(what="calibration")
        begin = time.perf_counter()
        gradients.zero()
        ranks.add(gradients.buffer, what="calibration")
        gradients.normalise(1.0, 1.0)
        optimizer.step()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


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
