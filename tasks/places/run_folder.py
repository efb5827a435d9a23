"""The folder of a run: where everything it makes goes, held by one process at a time."""

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from configs.settings import NAME_PATTERN, SHARED_FOLDERS, RunConfig
from dflash_core.artifacts import content_digest
from dflash_core.errors import ConfigError, DFlashError
from tasks.launching.machines import Machines

__all__ = ["RunFolder", "held_folder", "open_run_folder"]

NAME = re.compile(NAME_PATTERN)
FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run.

    Attributes:
        root: Folder of all runs.
        name: Name of this run.
        config: The settings that say where it is, how long things may take, and whose turn it is.
        machines: Where torchrun runs besides this machine.
    """

    root: Path
    name: str
    config: RunConfig
    machines: Machines | None = None

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
def held_folder(folder: Path, *, place: str, name: str) -> Iterator[None]:
    """Make a folder and hold it: nobody else works in it until the block ends.

    Args:
        folder: The folder.
        place: Setting that puts it elsewhere, for the message.
        name: Setting that names another.

    Raises:
        ConfigError: It cannot be written, or another process holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise ConfigError(
            f"the run folder {folder} cannot be written ({os.strerror(error.errno or 0)}); set "
            f"{place} to a folder with space that you may write to"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another process is working in {folder}; wait for it, or set {name} to another"
            ) from None
        yield


@contextmanager
def open_run_folder(config: RunConfig, *, default_name: str) -> Iterator[RunFolder]:
    """Make the run's folder and hold it.

    Args:
        config: Root and name.
        default_name: Name when the settings give none; any text, such as a flow run's.

    Raises:
        ConfigError: The folder cannot be written or is nearly full, or another run holds it.
        DFlashError: The disk became full while the folder was held.
    """
    folder = RunFolder(
        config.root.resolve(),
        config.name or _folder_name(default_name),
        config,
        Machines.of(config),
    )
    with held_folder(folder.path, place="run.root", name="run.name"):
        folder.cache.mkdir(exist_ok=True)
        free_gb = shutil.disk_usage(folder.path).free / 1e9
        if free_gb < config.min_free_gb:
            raise ConfigError(
                f"the run folder {folder.path} has {free_gb:.1f} GB left but a run wants "
                f"{config.min_free_gb:g} GB (run.min_free_gb); make room, or set run.root elsewhere"
            )
        if folder.machines is not None:
            folder.machines.begin()
        try:
            yield folder
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise DFlashError(
                f"the disk of {folder.path} is full ({os.strerror(error.errno)}); make room, and "
                "the same command continues"
            ) from error
        finally:
            if folder.machines is not None:
                folder.machines.dismiss()


def _folder_name(text: str) -> str:
    """Return a text as it may stand in `RunConfig.name`, and different texts as different names."""
    if NAME.fullmatch(text) and text not in SHARED_FOLDERS:
        return text
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("._-")[:80] or "run"
    return f"{plain}-{content_digest(text)[:8]}"
