"""Names of cached artifacts: by content of inputs, settings and code, never by time or place."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_core.artifacts import content_digest, core_digest
from tasks.console import announce
from tasks.places.run_folder import RunFolder

__all__ = ["alone", "cached_path"]


def cached_path(folder: RunFolder, kind: str, *parts: object) -> Path:
    """Return where an artifact made of these parts lies or will lie.

    Prefect hashes a task's own lines only; thin tasks would never notice that the core changed, so
    the core's digest is a part of every name.
    """
    return folder.cache / f"{kind}-{content_digest(core_digest(), *parts)[:16]}"


@contextmanager
def alone(folder: RunFolder, name: str) -> Iterator[None]:
    """Let no other run under the same root make something of this name meanwhile; it waits."""
    file = folder.root / "locks" / name
    file.parent.mkdir(exist_ok=True)
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            announce(f"waiting for another run that makes {name}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
