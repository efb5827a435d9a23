"""What earlier runs on a machine measured against what had been predicted. No torch here."""

import json
from pathlib import Path

from dflash_core.artifacts import atomic_write
from dflash_core.errors import ArtifactError
from dflash_core.throughput import Fingerprint

__all__ = ["history_file", "read_ratios", "remember_ratio"]

MOST_RUNS = 100


def history_file(folder: Path, fingerprint: Fingerprint) -> Path:
    """Return where the history of a machine and model lies."""
    return folder / f"machine-{fingerprint.digest}.json"


def read_ratios(file: Path) -> list[float]:
    """Return measured / predicted throughput of past runs, oldest first; none without a file.

    Raises:
        ArtifactError: The file is damaged.
    """
    if not file.is_file():
        return []
    try:
        ratios = [float(ratio) for ratio in json.loads(file.read_bytes())["ratios"]]
    except (ValueError, KeyError, TypeError):
        raise ArtifactError(
            f"{file} is no history of a machine; remove it to begin a new one"
        ) from None
    return ratios


def remember_ratio(file: Path, ratio: float) -> None:
    """Add a run to a machine's history."""
    ratios = [*read_ratios(file), ratio][-MOST_RUNS:]
    atomic_write(file, json.dumps({"ratios": ratios}) + "\n")
