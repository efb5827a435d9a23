"""Checkpoints: written beside and renamed, read safely, the newest complete one wins."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dflash_core.artifacts import new_artifact, read_manifest, verify_artifact
from dflash_core.config import FrozenModel
from dflash_core.errors import ArtifactError, ConfigError

__all__ = ["Cursor", "latest_checkpoint", "load_checkpoint", "save_checkpoint"]

KIND = "checkpoint"
VERSION = 1
STATE_NAME = "state.pt"


class Cursor(FrozenModel):
    """Where a run is, and what it must be resumed with.

    ``ingredients`` are what decides which samples a step holds: a run continues only if all of
    them are the same.
    """

    step: int
    """Optimizer steps done."""
    epoch: int
    """Epoch of the next step."""
    step_in_epoch: int
    """Steps of that epoch already done."""
    bad_steps: int
    """Steps skipped in a row for a loss that was not finite."""
    ingredients: dict[str, str]
    """Name and hash of everything that the plan and the model are made of."""


@dataclass(frozen=True)
class Loaded:
    """A checkpoint's content: cursor and tensors."""

    cursor: Cursor
    state: dict[str, Any]


def save_checkpoint(
    folder: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    cursor: Cursor,
    *,
    keep: int,
) -> Path:
    """Write one checkpoint and drop the oldest beyond ``keep``.

    Raises:
        OSError: The disk is full; earlier checkpoints are untouched.
    """
    path = folder / f"step-{cursor.step:08d}"
    metadata = {"cursor": cursor.model_dump()}
    with new_artifact(path, kind=KIND, format_version=VERSION, metadata=metadata) as scratch:
        state = {
            "module": module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "rng": torch.get_rng_state(),
        }
        with (scratch / STATE_NAME).open("wb") as stream:
            torch.save(state, stream)
    for old in _complete(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return path


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint whose every byte is as it was written, or None."""
    for path in reversed(_complete(folder)):
        try:
            verify_artifact(path, read_manifest(path, kind=KIND, format_version=VERSION))
        except ArtifactError:
            continue
        return path
    return None


def load_checkpoint(path: Path, ingredients: dict[str, str]) -> Loaded:
    """Read a checkpoint that belongs to this run.

    Args:
        path: The checkpoint.
        ingredients: This run's own; see `Cursor`.

    Raises:
        ConfigError: The checkpoint was made of something else; the message names what.
    """
    manifest = read_manifest(path, kind=KIND, format_version=VERSION)
    cursor = Cursor.model_validate(manifest.metadata["cursor"])
    changed = _changed(cursor.ingredients, ingredients)
    if changed:
        raise ConfigError(
            f"{path} was made with another {', '.join(changed)}; put it back, or set run.name or "
            "training.resume to start anew"
        )
    state = torch.load(path / STATE_NAME, map_location="cpu", weights_only=True)
    return Loaded(cursor, state)


def _changed(old: dict[str, str], new: dict[str, str]) -> Sequence[str]:
    return [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]


def _complete(folder: Path) -> list[Path]:
    """Return checkpoints in the order of their steps; unfinished ones have hidden names."""
    return sorted(folder.glob("step-*")) if folder.is_dir() else []
