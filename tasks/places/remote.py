"""Chats in object storage: s3://, gs:// and whatever else fsspec opens, as files of this machine.

A path such as s3://bucket/chats is kept as a `Path`, which folds the two slashes into one; this
module unfolds them. What was fetched is found again by address and version of the object.
"""

import re
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from prefect import State, task
from prefect.cache_policies import NO_CACHE

from dflash_core.artifacts import content_digest
from dflash_core.config import changed
from dflash_core.corpus.config import CorpusConfig
from dflash_core.errors import ConfigError, DataError, TimeLimitError
from tasks.console import announce
from tasks.places.run_folder import RunFolder

__all__ = ["is_remote", "with_local_inputs"]

T = TypeVar("T")
REMOTE = re.compile(r"^([a-z][a-z0-9+.-]+):/+(.+)$")


def is_remote(path: Path) -> bool:
    """Say whether a path is an address in object storage."""
    return REMOTE.match(str(path)) is not None


def may_pass(task: Any, run: Any, state: State[Any]) -> bool:
    """Say whether a fetch failed by an outage, which another try may outlast."""
    cause = getattr(state.result(raise_on_failure=False), "__cause__", None)
    return isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError | PermissionError)


@task(
    name="fetch-inputs",
    cache_policy=NO_CACHE,
    retries=3,
    retry_delay_seconds=[2, 15, 60],
    retry_condition_fn=may_pass,
)
def with_local_inputs(config: CorpusConfig, folder: RunFolder) -> CorpusConfig:
    """Return settings whose inputs are files here; versions seen before are not fetched again.

    Raises:
        ConfigError: The library for an address is not installed.
        DataError: There is nothing at an address.
        TimeLimitError: The storage stopped answering.
    """
    fields = ("inputs", "held_out_inputs")
    local = {
        name: tuple(_fetch(p, folder) if is_remote(p) else p for p in getattr(config, name))
        for name in fields
    }
    return changed(config, local)


def _fetch(path: Path, folder: RunFolder) -> Path:
    url = REMOTE.sub(r"\1://\2", str(path))
    try:
        system, root = fsspec.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"corpus.inputs names {url}, which cannot be opened: {error}") from None

    def look() -> dict[str, str]:
        return {name: str(system.ukey(name)) for name in sorted(system.find(root))}

    limit_s = folder.config.fetch_limit_s
    try:
        objects = _within(limit_s, url, look)
        out = folder.cache / f"fetched-{content_digest(url, objects)[:16]}"
        for name in objects:
            file = out / _inside(name, root, url)
            _within(limit_s, name, lambda name=name, file=file: _fetch_one(system, name, file))
    except OSError as error:
        raise DataError(f"{url} cannot be read ({error}); check address and rights") from error
    if not objects:
        raise DataError(f"there is nothing at {url}; give an existing object or folder")
    return out / Path(root).name if list(objects) == [root] else out


def _inside(name: str, root: str, url: str) -> str:
    """Return where an object goes below its folder here; keys are any text, dots and all."""
    inside = name[len(root) :].lstrip("/") or Path(name).name
    if ".." in Path(inside).parts:
        raise DataError(
            f"the object {name} at {url} has '..' in its name and would be written outside its "
            "folder; rename it, or name others in corpus.inputs"
        )
    return inside


def _fetch_one(system: Any, name: str, file: Path) -> None:
    if not file.is_file():
        announce(f"fetching {name}")
        # Other runs under the root may fetch it now too, each into a file of its own.
        part = file.with_name(f".{uuid.uuid4().hex}.part")
        part.parent.mkdir(parents=True, exist_ok=True)
        try:
            system.get_file(name, str(part))
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)


def _within(seconds: float, what: str, call: Callable[[], T]) -> T:
    """Return what a call gives; one that does not come back is left alone with its thread."""
    found: Future[T] = Future()

    def work() -> None:
        try:
            found.set_result(call())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=work, name="fetch", daemon=True).start()
    try:
        return found.result(seconds)
    except TimeoutError:
        if found.done():  # the storage's own
            raise
        raise TimeLimitError(
            f"{what} did not arrive within {seconds:g} s (run.fetch_limit_s); see whether the "
            "storage answers, or raise the limit"
        ) from None
