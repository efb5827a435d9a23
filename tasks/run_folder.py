"""The folder of a run: where everything it makes goes, held by one process at a time."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from configs.settings import RunConfig
from dflash_core.errors import ConfigError

__all__ = ["RunFolder", "open_run_folder"]


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run.

    Attributes:
        root: Folder of all runs.
        name: Name of this run.
    """

    root: Path
    name: str

    @property
    def path(self) -> Path:
        """Everything that belongs to this run alone."""
        return self.root / self.name

    @property
    def cache(self) -> Path:
        """Artifacts named by their content, shared by all runs."""
        return self.root / "cache"

    @property
    def training(self) -> Path:
        """The torchrun program's folder."""
        return self.path / "training"

    @property
    def export(self) -> Path:
        """The drafter as servers load it."""
        return self.path / "drafter"

    @property
    def page(self) -> Path:
        """The report."""
        return self.path / "report.html"


@contextmanager
def open_run_folder(config: RunConfig, *, default_name: str) -> Iterator[RunFolder]:
    """Make the run's folder and hold it.

    Args:
        config: Root and name.
        default_name: Name when the settings give none.

    Raises:
        ConfigError: The folder cannot be written, or another run holds it.
    """
    folder = RunFolder(config.root.resolve(), config.name or default_name)
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.cache.mkdir(exist_ok=True)
        lock = (folder.path / ".lock").open("w")
    except OSError as error:
        raise ConfigError(
            f"the run folder {folder.path} cannot be written ({os.strerror(error.errno or 0)}); "
            "set run.root to a folder with space that you may write to"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another process is working in {folder.path}; wait for it, or set run.name to "
                "another name"
            ) from None
        yield folder
