"""A job on a machine whose costs are known: balanced by them before, held against them after."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from numpy.typing import ArrayLike
from pydantic import ValidationError

from dflash_core.calibration.machines import (
    PastRun,
    costs_digest,
    history_file,
    ratios_under,
    read_runs,
    remember_run,
)
from dflash_core.config import changed, problem_of
from dflash_core.errors import CalibrationError
from dflash_core.throughput import (
    Accuracy,
    CostModel,
    Drift,
    Prediction,
    hold_against,
    learn_drift,
)
from dflash_core.training.config import TrainingJob
from dflash_core.training.telemetry.status import read_metrics

__all__ = ["Calibration", "balanced", "hold_job", "read_calibration"]


@dataclass(frozen=True)
class Calibration:
    """A calibrated machine.

    Attributes:
        file: Where it lies; the history of runs lies beside it.
        cost: Its costs, with the drift that those runs taught.
        learnt: What they taught.
    """

    file: Path
    cost: CostModel
    learnt: Drift


def read_calibration(file: Path) -> Calibration:
    """Read a calibration and what runs taught since it was made.

    Raises:
        CalibrationError: There is none, or it is damaged.
        ArtifactError: Its history is damaged.
    """
    cost = _read_cost_model(file)
    learnt = learn_drift(ratios_under(cost, read_runs(history_file(file))), prior=cost.drift)
    return Calibration(file, changed(cost, {"drift": learnt.drift}), learnt)


def hold_job(
    job: TrainingJob,
    prediction: Prediction,
    calibration: Calibration,
    *,
    on_warning: Callable[[str], None],
) -> Accuracy:
    """Compare each epoch of a finished job with its prediction, and remember how it went.

    Args:
        job: What ran.
        prediction: Made before, with the calibration.
        calibration: Its history takes the run in.
        on_warning: Told when the history cannot be written.

    Raises:
        DataError: The run has no steps.
    """
    lines = read_metrics(job.run_dir)
    found = taught = hold_against(lines, prediction)
    if job.training.features == "cache":
        # The epoch that fills the feature cache may have found it filled: it teaches nothing.
        lines = [line for line in lines if line["epoch"] > 0]
        if not lines:
            return found
        taught = hold_against(lines, prediction)
    history = history_file(calibration.file)
    past = PastRun(
        run=str(job.run_dir.resolve()),
        calibration=costs_digest(calibration.cost),
        measured_ktok_s=taught.measured_ktok_s,
        predicted_ktok_s=taught.predicted_ktok_s,
    )
    try:
        remember_run(history, past)
    except OSError as error:
        on_warning(
            f"how the run went is not remembered, because {history} cannot be written "
            f"({error.strerror}); later predictions learn nothing from it"
        )
    return found


def _read_cost_model(file: Path) -> CostModel:
    try:
        return CostModel.model_validate_json(file.read_bytes())
    except OSError as error:
        raise CalibrationError(
            f"the calibration {file} cannot be read ({error.strerror}); make one with dflash-flow "
            "calibrate --out FILE"
        ) from None
    except ValidationError as error:
        raise CalibrationError(
            f"{file} is no calibration ({problem_of(error)}); make one with dflash-flow calibrate "
            "--out FILE"
        ) from None


def balanced(job: TrainingJob, cost: CostModel, lengths: ArrayLike) -> TrainingJob:
    """Return the job with its ranks balanced by measured costs; steps hold what they held.

    Args:
        job: The run.
        cost: The calibrated machine.
        lengths: Length of each training sample in tokens.
    """
    consumers = cost.plan_cost(
        job.training.topology.kind, block_size=job.draft.block_size, lengths=lengths
    )
    return changed(job, {"consumer_cost": consumers, "target_cost": cost.target_cost()})
