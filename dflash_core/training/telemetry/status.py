"""Follow a run from outside: its status and the newest steps, without torch and without a lock."""

import json
import os
import time
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dflash_core.config import FrozenModel
from dflash_core.errors import ArtifactError

__all__ = [
    "METRICS_NAME",
    "STATUS_NAME",
    "RunLog",
    "RunStatus",
    "find_run",
    "read_metrics",
    "read_status",
]

METRICS_NAME = "metrics.jsonl"
STATUS_NAME = "status.json"
LAST_BYTES = 4 << 20
MOST_STEPS = 2000


class RunStatus(FrozenModel):
    """What the ranks last wrote of themselves."""

    state: str
    """running, finished, interrupted or failed."""
    step: int = 0
    """Steps done when it was written."""
    num_steps: int = 0
    """Steps of the run."""
    reason: str = ""
    """Why it stopped, when it did not finish."""
    kind: str = ""
    """Class of the error that it failed with."""


class RunLog:
    """Reads what a run has written since the last look.

    Args:
        folder: The run's folder, see `find_run`.

    Attributes:
        steps: The newest steps' metrics, oldest first.
        status: The newest status, None before there is one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[dict[str, Any]] = []
        self.status: RunStatus | None = None
        self._file = folder / METRICS_NAME
        self._inode: int | None = None
        self._offset = 0

    def refresh(self) -> None:
        """Read new complete lines; a file that a resumed run wrote anew is read from its start."""
        self.status = read_status(self.folder)
        try:
            stream = self._file.open("rb")
        except FileNotFoundError:
            return
        with stream:
            self._place(stream)
            data = stream.read()
        end = data.rfind(b"\n") + 1
        self._offset += end
        for line in data[:end].splitlines():
            self._take(line)
        del self.steps[:-MOST_STEPS]

    @property
    def idle_s(self) -> float:
        """Seconds since the run last wrote a step or a status."""
        files = (self._file, self.folder / STATUS_NAME)
        written = [file.stat().st_mtime for file in files if file.is_file()]
        return max(time.time() - max(written, default=time.time()), 0.0)

    def _place(self, stream: Any) -> None:
        """Move to where the last look ended, or near the end of a long file never seen."""
        inode = os.fstat(stream.fileno()).st_ino
        size = stream.seek(0, 2)
        if inode != self._inode or size < self._offset:
            self.steps.clear()
            self._inode = inode
            self._offset = max(size - LAST_BYTES, 0)
            if self._offset:
                stream.seek(self._offset)
                self._offset += len(stream.readline())
        stream.seek(self._offset)

    def _take(self, line: bytes) -> None:
        try:
            step = json.loads(line)
        except ValueError:
            return  # a crash cut it short; the resumed run writes that step again
        if isinstance(step, dict) and isinstance(step.get("step"), int):
            self.steps.append(step)


def find_run(path: Path) -> Path:
    """Return the folder with the ranks' files: the given one or its ``training``.

    Raises:
        ArtifactError: Neither holds a status, metrics or a job.
    """
    for folder in (path, path / "training"):
        if any((folder / name).is_file() for name in (STATUS_NAME, METRICS_NAME, "job.json")):
            return folder
    raise ArtifactError(
        f"{path} holds no training run: neither it nor its folder 'training' has {STATUS_NAME}; "
        "give the folder of a run"
    )


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return every step of a run that is not being written to, in order."""
    return [json.loads(line) for line in (folder / METRICS_NAME).read_text().splitlines()]


def read_status(folder: Path) -> RunStatus | None:
    """Return what the ranks last wrote of themselves, or None before they wrote anything.

    Raises:
        ArtifactError: The file is damaged.
    """
    file = folder / STATUS_NAME
    try:
        raw = json.loads(file.read_bytes())
        return RunStatus.model_validate({k: raw[k] for k in RunStatus.model_fields if k in raw})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, ValidationError):
        raise ArtifactError(f"{file} is damaged; start the run again to have a new one") from None
