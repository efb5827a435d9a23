"""A job on a machine whose costs are known: its calibration, and ranks balanced by it."""

from pathlib import Path

from numpy.typing import ArrayLike
from pydantic import ValidationError

from dflash_core.errors import CalibrationError
from dflash_core.throughput import CostModel
from dflash_core.training.config import TrainingJob

__all__ = ["balanced", "read_cost_model"]


def read_cost_model(file: Path) -> CostModel:
    """Read a calibration.

    Raises:
        CalibrationError: There is none, or it is damaged.
    """
    try:
        return CostModel.model_validate_json(file.read_bytes())
    except OSError as error:
        raise CalibrationError(
            f"the calibration {file} cannot be read ({error.strerror}); make one with dflash-flow "
            "calibrate --out FILE"
        ) from None
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, problem["loc"]))
        raise CalibrationError(
            f"{file} is no calibration ({place}: {problem['msg']}); make one with dflash-flow "
            "calibrate --out FILE"
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
    return job.model_copy(update={"consumer_cost": consumers, "target_cost": cost.target_cost()})
