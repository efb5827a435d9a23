"""A short real run, where a prediction's interval holds the gate's threshold."""

import shutil

from prefect import task
from prefect.cache_policies import NO_CACHE

from dflash_core.artifacts import atomic_write
from dflash_core.throughput import measured_ktok_s
from dflash_core.training.config import TrainingJob, ValidationConfig
from dflash_core.training.progress import read_metrics
from tasks.console import announce, logger
from tasks.gpu_pool import gpu_slot
from tasks.run_folder import RunFolder
from tasks.torchrun import run_torchrun

__all__ = ["pilot"]


@task(name="pilot", cache_policy=NO_CACHE)
def pilot(job: TrainingJob, folder: RunFolder, *, num_steps: int) -> float:
    """Train so many steps in a folder beside the run's and return the measured Ktok/s.

    Call it directly: a submitted task runs in a thread, whose end would end the ranks.
    """
    run_dir = job.run_dir.with_name(f"pilot-{job.batching.strategy}-{job.batching.mixing}")
    shutil.rmtree(run_dir, ignore_errors=True)
    # A feature cache that one pilot fills would make the next one look fast.
    alone = {
        "max_steps": num_steps,
        "resume": False,
        "features": "online",
        "validation": ValidationConfig(),
    }
    training = job.training.model_copy(update=alone)
    short = job.model_copy(update={"run_dir": run_dir, "training": training, "heldout_store": None})
    file = atomic_write(run_dir / "job.json", short.model_dump_json(indent=1) + "\n")
    with gpu_slot(folder.config):
        run_torchrun(
            "dflash_core.training",
            ["--config", str(file)],
            num_ranks=training.topology.num_ranks,
            run_dir=run_dir,
            threads_per_rank=training.threads_per_rank,
            config=folder.config,
            machines=folder.machines,
            on_line=logger().info,
        )
    lines = read_metrics(run_dir)
    ktok_s = measured_ktok_s(lines)
    announce(
        f"pilot: {job.batching.strategy}/{job.batching.mixing} gave {ktok_s:.2f} Ktok/s in "
        f"{len(lines)} steps"
    )
    return ktok_s
