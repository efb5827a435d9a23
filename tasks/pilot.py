"""A short real run, where a prediction's interval holds the gate's threshold."""

import shutil

from prefect import task
from prefect.cache_policies import NO_CACHE

from dflash_core.artifacts import atomic_write
from dflash_core.config import changed
from dflash_core.throughput import measured_ktok_s
from dflash_core.training.config import TrainingJob, ValidationConfig
from dflash_core.training.telemetry.status import read_metrics, read_status
from tasks.console import announce, logger
from tasks.launching.gpu_pool import gpu_slot
from tasks.launching.torchrun import run_torchrun
from tasks.places.run_folder import RunFolder
from tasks.train import JOB_NAME

__all__ = ["pilot"]


@task(name="pilot", cache_policy=NO_CACHE)
def pilot(job: TrainingJob, folder: RunFolder, *, num_steps: int) -> float:
    """Train so many steps in a folder beside the run's and return the measured Ktok/s.

    A run that is called again keeps what its pilots measured, as long as the job is the same.

    Call it directly: a submitted task runs in a thread, whose end would end the ranks.
    """
    run_dir = job.run_dir.with_name(f"pilot-{job.batching.strategy}-{job.batching.mixing}")
    # A feature cache that one pilot fills would make the next one look fast.
    alone = {
        "max_steps": num_steps,
        "resume": False,
        "features": "online",
        "validation": ValidationConfig(),
    }
    training = changed(job.training, alone)
    short = changed(job, {"run_dir": run_dir, "training": training, "held_out_store": None})
    if not _is_finished(short):
        _run(short, folder)
    lines = read_metrics(run_dir)
    ktok_s = measured_ktok_s(lines)
    announce(
        f"pilot: {job.batching.strategy}/{job.batching.mixing} gave {ktok_s:.2f} Ktok/s in "
        f"{len(lines)} steps"
    )
    return ktok_s


def _is_finished(job: TrainingJob) -> bool:
    file, status = job.run_dir / JOB_NAME, read_status(job.run_dir)
    finished = status is not None and status.state == "finished"
    return finished and file.is_file() and file.read_text() == _text(job)


def _run(job: TrainingJob, folder: RunFolder) -> None:
    shutil.rmtree(job.run_dir, ignore_errors=True)
    file = atomic_write(job.run_dir / JOB_NAME, _text(job))
    with gpu_slot(folder.config):
        run_torchrun(
            "dflash_core.training",
            ["--config", str(file)],
            num_ranks=job.training.topology.num_ranks,
            run_dir=job.run_dir,
            threads_per_rank=job.training.threads_per_rank,
            config=folder.config,
            machines=folder.machines,
            on_line=logger().info,
        )


def _text(job: TrainingJob) -> str:
    return job.model_dump_json(indent=1) + "\n"
