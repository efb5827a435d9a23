"""The run as one value, as a page, and as Prefect artifacts."""

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from dflash_core.artifacts import atomic_write
from dflash_core.reporting import RunSummary, TrainingFacts, render_page
from dflash_core.reporting.summary import StrategyFacts
from dflash_core.throughput import Accuracy
from dflash_core.training.config import TrainingJob
from dflash_core.training.memory.preflight import MemoryReport
from dflash_core.training.telemetry.status import read_metrics
from dflash_core.training.trainer import MEMORY_NAME
from tasks.artifacts import publish
from tasks.places.run_folder import RunFolder

__all__ = ["environment", "training_facts", "write_report"]

SUMMARY_NAME = "summary.json"
PACKAGES = ("torch", "transformers", "prefect", "mlflow", "polars", "numpy")


@task(name="write-report", cache_policy=NO_CACHE)
def write_report(summary: RunSummary, folder: RunFolder) -> Path:
    """Write summary and page into the run's folder, and the Prefect artifacts."""
    atomic_write(folder.path / SUMMARY_NAME, summary.model_dump_json(indent=1) + "\n")
    page = atomic_write(folder.page, render_page(summary))
    publish(summary, page)
    return page


def training_facts(job: TrainingJob, strategy: StrategyFacts, accuracy: Accuracy) -> TrainingFacts:
    """Read what training wrote and say what it did."""
    lines = read_metrics(job.run_dir)
    learnt = [line for line in lines if line["loss"] is not None]  # null where a step was skipped
    last = learnt[-max(len(learnt) // 20, 1) :]
    return TrainingFacts(
        strategy=f"{strategy.name}/{strategy.mixing}",
        num_steps=len(lines),
        epochs=job.training.epochs,
        seconds=sum(line["step_s"] for line in lines),
        measured_ktok_s=accuracy.measured_ktok_s,
        predicted_ktok_s=accuracy.predicted_ktok_s,
        accuracy=accuracy,
        final_loss=sum(line["loss"] for line in last) / len(last),
        acceptance_at_anchors=sum(line["acceptance_at_anchors"] for line in last) / len(last),
        memory=_memory(job),
        peak_memory_bytes=max(line["peak_memory_bytes"] for line in lines),
        losses=tuple(line["loss"] for line in learnt),
        acceptances=tuple(line["acceptance_at_anchors"] for line in learnt),
    )


def _memory(job: TrainingJob) -> str:
    file = job.run_dir / MEMORY_NAME  # none without a pre-flight, and on runs of older versions
    return str(MemoryReport.model_validate_json(file.read_bytes())) if file.is_file() else ""


def environment() -> dict[str, str]:
    """Return the commit and the versions that made a run."""
    found = {name: version(name) for name in PACKAGES}
    return {"commit": _commit(), "python": platform.python_version(), **found}


def _commit() -> str:
    root = Path(__file__).resolve().parent.parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
