"""Afterwards: what was measured against what was predicted, for MLflow and for the next run."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from dflash_core.calibration.history import Calibration, hold_job
from dflash_core.reporting import StrategyFacts
from dflash_core.throughput import Accuracy
from dflash_core.training.config import TrainingJob
from tasks.console import warn
from tasks.tracking.run import TrackedRun

__all__ = ["hold_run"]


@task(name="hold-against-prediction", cache_policy=NO_CACHE)
def hold_run(
    job: TrainingJob, strategy: StrategyFacts, calibration: Calibration, run: TrackedRun
) -> Accuracy:
    """Compare each epoch with the prediction, record it, and remember how this machine did."""
    found = hold_job(job, strategy.prediction, calibration, on_warning=warn)
    run.log_json("prediction.json", found.model_dump(mode="json"))
    for epoch in found.epochs:
        stages = {
            f"busy_share_error/{stage}/epoch_{epoch.epoch}": predicted - epoch.measured_busy[stage]
            for stage, predicted in epoch.predicted_busy.items()
            if stage in epoch.measured_busy
        }
        run.log_metrics({f"prediction_error/epoch_{epoch.epoch}": epoch.error, **stages})
    return found
