"""What earlier runs under a calibration measured against what had been predicted. No torch here.

The history lies beside the calibration's file and is only ever added to, one JSON object a line. A
calibration that is made again takes the place of the old one and begins with no runs.
"""

import fcntl
from pathlib import Path

from pydantic import Field, ValidationError

from dflash_core.artifacts import content_digest
from dflash_core.config import FrozenModel, problem_of
from dflash_core.errors import ArtifactError
from dflash_core.throughput import CostModel

__all__ = ["PastRun", "costs_digest", "history_file", "ratios_under", "read_runs", "remember_run"]


class PastRun(FrozenModel):
    """A run that was held against its prediction."""

    run: str
    """Its folder."""
    calibration: str
    """Digest of the costs that it was predicted with."""
    measured_ktok_s: float = Field(gt=0, allow_inf_nan=False)
    """Real tokens per second, in thousands."""
    predicted_ktok_s: float = Field(gt=0, allow_inf_nan=False)
    """What had been predicted."""


def history_file(calibration: Path) -> Path:
    """Return where the history of a calibration lies."""
    return calibration.with_name(f"{calibration.name}.runs.jsonl")


def costs_digest(cost: CostModel) -> str:
    """Return a name of measured costs; what runs taught since is no part of it."""
    return content_digest(cost.model_dump(mode="json", exclude={"drift"}))[:16]


def read_runs(file: Path) -> list[PastRun]:
    """Return past runs under this and earlier calibrations, oldest first; none without a file.

    A last line without its end is what a full disk left of one, and no run.

    Raises:
        ArtifactError: The file is damaged.
    """
    if not file.is_file():
        return []
    whole, _, _ = file.read_bytes().rpartition(b"\n")
    try:
        return [PastRun.model_validate_json(line) for line in whole.splitlines()]
    except ValidationError as error:
        raise ArtifactError(
            f"{file} is no history of a machine ({problem_of(error, whole='a line')}); remove it "
            "to begin a new one"
        ) from None


def ratios_under(cost: CostModel, runs: list[PastRun]) -> list[float]:
    """Return measured / predicted throughput of the runs under these costs, oldest first.

    A run that went on and was measured again counts once, as it ended.
    """
    digest = costs_digest(cost)
    last: dict[str, PastRun] = {}
    for run in runs:
        if run.calibration == digest:
            last.pop(run.run, None)
            last[run.run] = run
    return [run.measured_ktok_s / run.predicted_ktok_s for run in last.values()]


def remember_run(file: Path, run: PastRun) -> None:
    """Add a run, unless it is there as measured already: a finished run that was called again."""
    with file.open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        known = {(past.run, past.measured_ktok_s) for past in read_runs(file)}
        if (run.run, run.measured_ktok_s) not in known:
            stream.truncate(file.read_bytes().rfind(b"\n") + 1)
            stream.write(f"{run.model_dump_json()}\n".encode())
            stream.flush()
