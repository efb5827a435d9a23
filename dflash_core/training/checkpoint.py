"""Checkpoints: written beside and renamed, read safely, the newest complete one wins."""

import os
import re
import shutil
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

from dflash_core.artifacts import new_artifact, read_manifest, verify_artifact
from dflash_core.config import FrozenModel, changed
from dflash_core.errors import ArtifactError, ConfigError
from dflash_core.planning import changed_ingredients

__all__ = [
    "Cursor",
    "checkpoint_path",
    "checkpoints_folder",
    "give_up",
    "has_checkpoint",
    "latest_checkpoint",
    "latest_step",
    "load_checkpoint",
    "open_checkpoint",
    "read_cursor",
    "save_checkpoint",
    "set_aside",
]

KIND = "checkpoint"
VERSION = 2
STATE_NAME = "state.pt"
SET_ASIDE = "set-aside"
DIVERGED = "diverged"
NAME = re.compile(r"step-\d{8,}")
RATES = [
    f"training.optimizer.{name}"
    for name in ("learning_rate", "warmup_ratio", "min_lr_ratio", "grad_clip")
]


class Cursor(FrozenModel):
    """Where a run is, and what it must be resumed with.

    The step says which samples were consumed: the plan is the same on any number of ranks.
    ``ingredients`` are what decides which samples a step holds: a run continues only if all of
    them are the same.
    """

    step: int = 0
    """Optimizer steps done."""
    bad_steps: int = 0
    """Steps skipped in a row for a loss that was not finite."""
    skipped_steps: int = 0
    """Steps skipped in all."""
    first_loss: float | None = None
    """Loss of the first step that anything was learnt from."""
    best_step: int | None = None
    """Step of the best held-out measurement."""
    best_score: float | None = None
    """Its score; more is better."""
    num_worse: int = 0
    """Measurements since then."""
    ingredients: dict[str, str]
    """Name and hash of everything that the plan and the model are made of."""


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step is."""
    return folder / f"step-{step:08d}"


def save_checkpoint(folder: Path, state: dict[str, Any], cursor: Cursor, *, keep: int) -> Path:
    """Write one checkpoint and drop the oldest beyond ``keep``; the best one stays.

    Later steps are of another attempt, see `set_aside`; they are not this one's to drop.

    Raises:
        OSError: The disk is full; earlier checkpoints are untouched.
    """
    path = checkpoint_path(folder, cursor.step)
    metadata = {"cursor": cursor.model_dump()}
    try:
        with (
            new_artifact(path, kind=KIND, format_version=VERSION, metadata=metadata) as scratch,
            (scratch / STATE_NAME).open("wb") as stream,
        ):
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # the zip writer complains of a short file
            raise error.__context__ from None
        raise
    (folder / DIVERGED).unlink(missing_ok=True)
    best = None if cursor.best_step is None else checkpoint_path(folder, cursor.best_step)
    for old in [one for one in _complete(folder) if one <= path][:-keep]:
        if old != best:
            shutil.rmtree(old, ignore_errors=True)
    return path


def set_aside(folder: Path, *, after: int) -> list[Path]:
    """Move checkpoints of later steps out of the way of a run that goes on from this one.

    They are of an attempt that was given up, or damaged: the next resume must not take them for
    this attempt's, and nobody asked for them to be deleted.

    Args:
        folder: The run's checkpoints.
        after: Step that the run goes on from.

    Returns:
        Where they are now; one of the same step that was set aside before keeps its name.
    """
    moved = []
    for path in _complete(folder):
        if path > checkpoint_path(folder, after):
            (folder / SET_ASIDE).mkdir(exist_ok=True)
            names = chain([path.name], (f"{path.name}-{n}" for n in count(2)))
            free = (folder / SET_ASIDE / name for name in names)
            moved.append(path.rename(next(place for place in free if not place.exists())))
    return moved


def give_up(folder: Path, *, step: int) -> None:
    """Set aside what led a run astray, and let it go on before with another learning rate.

    Args:
        folder: The run's checkpoints.
        step: Step of the last update: no later step has shown that its weights are good.
    """
    set_aside(folder, after=step - 1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DIVERGED).touch()


def checkpoints_folder(run_dir: Path) -> Path:
    """Return where a run keeps its checkpoints."""
    return run_dir / "checkpoints"


def has_checkpoint(run_dir: Path) -> bool:
    """Say whether a run has a checkpoint, without reading it."""
    return bool(_complete(checkpoints_folder(run_dir)))


def latest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint, 0 without one; nothing is read."""
    return max((int(path.name.removeprefix("step-")) for path in _complete(folder)), default=0)


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint whose every byte is as it was written, or None."""
    for path in reversed(_complete(folder)):
        try:
            verify_artifact(path, read_manifest(path, kind=KIND, format_version=VERSION))
        except ArtifactError:
            continue
        return path
    return None


def read_cursor(path: Path, ingredients: dict[str, str]) -> Cursor:
    """Return the cursor of a checkpoint that belongs to this run.

    Args:
        path: The checkpoint.
        ingredients: This run's own; see `Cursor`. After a divergence the learning rate and what
            goes with it may be others than the checkpoint's.

    Raises:
        ConfigError: The checkpoint was made of something else; the message names what.
    """
    manifest = read_manifest(path, kind=KIND, format_version=VERSION)
    cursor = Cursor.model_validate(manifest.metadata["cursor"])
    free = RATES if (path.parent / DIVERGED).exists() else ()
    both = (cursor.ingredients, ingredients)
    other = changed_ingredients(
        *({name: value for name, value in one.items() if name not in free} for one in both)
    )
    if other:
        raise ConfigError(
            f"{path} cannot be continued: {'; '.join(other)}; put it back, or set run.name or "
            "training.resume to start anew"
        )
    return changed(cursor, {"ingredients": ingredients})


def open_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint of any run, after its every byte was checked.

    Raises:
        ArtifactError: It is none, is damaged, or is of another format version.
    """
    verify_artifact(path, read_manifest(path, kind=KIND, format_version=VERSION))
    return load_checkpoint(path)


def load_checkpoint(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    """Read a checkpoint's tensors and plain values; nothing in it can run code.

    Args:
        path: The checkpoint.
        mapped: Leave tensors in the file until they are read, by ranks that need a share each.
    """
    return torch.load(path / STATE_NAME, map_location="cpu", weights_only=True, mmap=mapped)


def _complete(folder: Path) -> list[Path]:
    """Return checkpoints in the order of their steps; unfinished ones have hidden names."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in found if NAME.fullmatch(path.name))
