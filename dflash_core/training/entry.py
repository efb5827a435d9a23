"""What every torchrun program does around its work: read the job, join, leave the reason behind."""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from dflash_core.config import problem_of
from dflash_core.errors import ConfigError, DFlashError
from dflash_core.training.config import TrainingJob
from dflash_core.training.ranks.groups import Ranks, join_ranks
from dflash_core.training.telemetry.metrics import write_status
from dflash_core.training.telemetry.status import read_status

__all__ = ["read_job", "run_program", "steps_so_far"]


def read_job(file: Path) -> TrainingJob:
    """Read a job.

    Raises:
        ConfigError: The file cannot be read, or holds no job.
    """
    try:
        return TrainingJob.model_validate_json(file.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{file} is no training job ({error.strerror}); give a job.json"
        ) from None
    except ValidationError as error:
        raise ConfigError(
            f"{file} is no training job ({problem_of(error)}); give a job.json"
        ) from None


def run_program(job: TrainingJob, work: Callable[[Ranks], None]) -> int:
    """Work on this rank and return its exit code; a failure leaves its reason in the run folder.

    Args:
        job: Says who takes part, and where the reason goes.
        work: What this rank does among the others.
    """
    try:
        with join_ranks(job.training) as ranks:
            code = _guarded(job, work, ranks)
            if code and ranks.world_size > 1:
                _leave(code)
            return code
    except DFlashError as error:  # the group could not be joined, or not be left
        return _failed(job.run_dir, error)


def steps_so_far(run_dir: Path) -> tuple[int, int]:
    """Return the steps done and those of the run, as the status file has them."""
    status = read_status(run_dir)
    return (0, 0) if status is None else (status.step, status.num_steps)


def _guarded(job: TrainingJob, work: Callable[[Ranks], None], ranks: Ranks) -> int:
    """Work, and let the reason be known before peers notice that this rank is gone."""
    try:
        work(ranks)
    except DFlashError as error:
        return _failed(job.run_dir, error)
    except Exception as error:  # the reason must reach the flow, whatever it is
        traceback.print_exc()
        return _failed(job.run_dir, error, who=ranks.name)
    return 0


def _leave(code: int) -> None:
    """End at once: threads may wait for peers inside the communication library."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _failed(run_dir: Path, error: Exception, *, who: str = "") -> int:
    """Record the first failure; the peers' errors only follow from it."""
    kind = type(error).__name__
    reason = f"{who}: {kind}: {error}" if who else str(error)
    sys.stderr.write(f"{kind}: {reason}\n")
    step, num_steps = steps_so_far(run_dir)
    write_status(run_dir, "failed", step=step, num_steps=num_steps, reason=reason, kind=kind)
    return error.exit_code if isinstance(error, DFlashError) else 1
