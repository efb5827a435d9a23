"""Measure this machine, or find what was measured before."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from dflash_core.artifacts import atomic_write
from dflash_core.calibration.history import Calibration, read_calibration
from dflash_core.calibration.program import fingerprint
from dflash_core.config import changed
from dflash_core.training.config import TrainingJob
from tasks.console import announce, logger, warn
from tasks.launching.gpu_pool import gpu_slot
from tasks.launching.torchrun import run_torchrun
from tasks.places.keys import alone, cached_path
from tasks.places.run_folder import RunFolder

__all__ = ["calibrate"]


@task(name="calibrate", cache_policy=NO_CACHE)
def calibrate(job: TrainingJob, folder: RunFolder, *, given: Path | None = None) -> Calibration:
    """Time target and drafter with all ranks busy; reused while machine, models and code match.

    With ``run.calibrate_again`` what was measured before is not reused.
    """
    marks = fingerprint(job)
    budgets = {"token_budget", "anchor_budget", "max_samples", "anchors"}
    shapes = job.batching.model_dump(include=budgets)
    file = given or cached_path(folder, "calibration", marks.model_dump(), shapes)
    with alone(folder, file.name):
        known = file.is_file() and not folder.config.calibrate_again
        reused = given is not None or known
        if not reused:
            with gpu_slot(folder.config):
                _measure(job, file, folder)
    found = read_calibration(file)
    found.cost.require(marks)
    announce(
        f"calibration: held-out error {found.cost.relative_error:.1%}"
        f"{' (reused)' if reused else ''}"
    )
    if found.learnt.warning:
        warn(found.learnt.warning)
    for terms in found.cost.inseparable:
        announce(f"  the measured shapes cannot tell apart {terms}")
    return found


def _measure(job: TrainingJob, file: Path, folder: RunFolder) -> None:
    run_dir = folder.path / "calibration"
    here = changed(job, {"run_dir": run_dir})
    job_file = atomic_write(run_dir / "job.json", here.model_dump_json(indent=1) + "\n")
    run_torchrun(
        "dflash_core.calibration.program",
        ["--config", str(job_file), "--out", str(file)],
        num_ranks=job.training.topology.num_ranks,
        run_dir=run_dir,
        what="calibration",
        threads_per_rank=job.training.threads_per_rank,
        config=folder.config,
        machines=folder.machines,
        on_line=logger().info,
    )
