"""Afterwards: what was measured against what was predicted, for MLflow and for the next run."""

import json

from prefect import task
from prefect.cache_policies import NO_CACHE

from dflash_core.reporting import StrategyFacts
from dflash_core.throughput import Accuracy, hold_against
from dflash_core.training.calibration import fingerprint
from dflash_core.training.config import TrainingJob
from dflash_core.training.machine_history import history_file, remember_ratio
from tasks.run_folder import RunFolder
from tasks.tracking import TrackedRun

__all__ = ["hold_run"]


@task(name="hold-against-prediction", cache_policy=NO_CACHE)
def hold_run(
    job: TrainingJob, strategy: StrategyFacts, folder: RunFolder, run: TrackedRun
) -> Accuracy:
    """Compare each epoch with the prediction, record it, and remember how this machine did."""
    metrics = (job.run_dir / "metrics.jsonl").read_text()
    found = hold_against([json.loads(line) for line in metrics.splitlines()], strategy.prediction)
    run.log_json("prediction.json", found.model_dump(mode="json"))
    for epoch in found.epochs:
        stages = {
            f"busy_share_error/{stage}/epoch_{epoch.epoch}": predicted - epoch.measured_busy[stage]
            for stage, predicted in epoch.predicted_busy.items()
            if stage in epoch.measured_busy
        }
        run.log_metrics({f"prediction_error/epoch_{epoch.epoch}": epoch.error, **stages})
    history = history_file(folder.cache, fingerprint(job))
    remember_ratio(history, found.measured_ktok_s / found.predicted_ktok_s)
    return found
