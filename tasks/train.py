"""Run the torchrun program."""

from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from pydantic import ValidationError

from configs.settings import Settings
from dflash_core.artifacts import atomic_write
from dflash_core.calibration.history import balanced
from dflash_core.config import problem_of
from dflash_core.corpus.build import CorpusReport
from dflash_core.corpus.store import TokenStore
from dflash_core.errors import ArtifactError
from dflash_core.planning.config import BatchingConfig
from dflash_core.throughput import CostModel
from dflash_core.training.checkpoint import has_checkpoint
from dflash_core.training.config import TrainingJob, check_job
from dflash_core.training.memory.preflight import PREFLIGHT
from tasks.artifacts import progress_artifact
from tasks.console import announce, logger, progress
from tasks.launching.gpu_pool import gpu_slot
from tasks.launching.torchrun import run_torchrun
from tasks.places.run_folder import RunFolder, held_folder
from tasks.tracking.run import StepMetrics, TrackedRun
from tasks.tracking.system_metrics import system_metrics

__all__ = ["begun_with", "check_settings", "train", "training_job"]

JOB_NAME = "job.json"


def training_job(
    settings: Settings,
    corpus: CorpusReport,
    folder: RunFolder,
    *,
    strategy: str | None = None,
    mixing: str | None = None,
    cost: CostModel | None = None,
) -> TrainingJob:
    """Return the job of a run: its settings, with the chosen strategy and mixing if given.

    A calibrated machine's ranks are balanced by its costs.
    """
    chosen = {"strategy": strategy, "mixing": mixing}
    given = {name: value for name, value in chosen.items() if value is not None}
    batching = BatchingConfig.model_validate({**settings.batching.model_dump(), **given})
    job = _job(settings, batching, folder.training, corpus.train, corpus.held_out)
    return job if cost is None else balanced(job, cost, TokenStore.open(corpus.train).lengths)


def check_settings(settings: Settings, folder: RunFolder) -> None:
    """Look for settings of training that contradict each other, before there is a corpus.

    Raises:
        ConfigError: Two do.
    """
    _job(settings, settings.batching, folder.training, folder.cache, folder.cache)


def _job(
    settings: Settings, batching: BatchingConfig, run_dir: Path, store: Path, held_out: Path
) -> TrainingJob:
    validates = settings.training.validation.every_steps is not None
    job = TrainingJob(
        run_dir=run_dir,
        store=store,
        held_out_store=held_out if validates else None,
        target=settings.target,
        draft=settings.draft,
        loss=settings.loss,
        batching=batching,
        training=settings.training,
        init_drafter=settings.run.warm_start,
    )
    check_job(job)
    return job


def begun_with(settings: Settings, folder: RunFolder) -> BatchingConfig | None:
    """Return how the run that is to be resumed batches; None when a new one begins.

    Raises:
        ArtifactError: It was begun by another version of this program.
    """
    file = folder.training / JOB_NAME
    if not (settings.training.resume and has_checkpoint(folder.training) and file.is_file()):
        return None
    try:
        return TrainingJob.model_validate_json(file.read_bytes()).batching
    except ValidationError as error:
        raise ArtifactError(
            f"{file} is no job of this version ({problem_of(error)}); set run.name to another"
        ) from None


@task(name="train", cache_policy=NO_CACHE)
def train(job: TrainingJob, folder: RunFolder, run: TrackedRun) -> Path:
    """Train under torchrun, with steps going to MLflow as they come; returns the drafter.

    Call it directly: a submitted task runs in a thread, whose end would end the ranks.

    Raises:
        ConfigError: Another process trains there, such as ``dflash-flow train``.
    """
    with held_folder(job.run_dir, place="run.root", name="run.name"):
        return _train(job, folder, run)


def _train(job: TrainingJob, folder: RunFolder, run: TrackedRun) -> Path:
    job_file = atomic_write(job.run_dir / JOB_NAME, job.model_dump_json(indent=1) + "\n")
    steps = StepMetrics(run)
    run.log_files(job_file)

    def on_line(line: str) -> None:
        (announce if line.startswith(PREFLIGHT) else logger().info)(line)

    with (
        progress("training steps") as on_progress,
        progress_artifact("training-progress", "training steps") as on_page,
    ):

        def on_metrics(lines: list[dict[str, Any]]) -> None:
            steps.deliver(lines)
            for show in (on_progress, on_page):
                show(lines[-1]["step"], lines[-1]["num_steps"])

        with gpu_slot(folder.config), system_metrics(run):
            run_torchrun(
                "dflash_core.training",
                ["--config", str(job_file)],
                num_ranks=job.training.topology.num_ranks,
                run_dir=job.run_dir,
                threads_per_rank=job.training.threads_per_rank,
                config=folder.config,
                machines=folder.machines,
                on_line=on_line,
                on_metrics=on_metrics,
            )
    return job.run_dir / "drafter"
