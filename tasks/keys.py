"""Names of cached artifacts: by content of inputs, settings and code, never by time or place."""

from pathlib import Path

from dflash_core.artifacts import content_digest, core_digest
from tasks.run_folder import RunFolder

__all__ = ["cached_path"]


def cached_path(folder: RunFolder, kind: str, *parts: object) -> Path:
    """Return where an artifact made of these parts lies or will lie.

    Prefect hashes a task's own lines only; thin tasks would never notice that the core changed, so
    the core's digest is a part of every name.
    """
    return folder.cache / f"{kind}-{content_digest(core_digest(), *parts)[:16]}"
