"""Artifacts on disk: written beside their final name and renamed, checked when read.

An artifact is a directory with a ``manifest.json`` that is written last: kind, format version,
SHA-256 and size of each file, free metadata. A reader therefore sees a complete artifact or none.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from pydantic import Field, ValidationError

from dflash_core.config import FrozenModel
from dflash_core.errors import ArtifactError

__all__ = [
    "MANIFEST_NAME",
    "FileEntry",
    "Manifest",
    "atomic_write",
    "check_replaceable",
    "check_writable",
    "content_digest",
    "core_digest",
    "new_artifact",
    "read_manifest",
    "verify_artifact",
]

MANIFEST_NAME = "manifest.json"


class FileEntry(FrozenModel):
    """One file of an artifact."""

    sha256: str
    num_bytes: int


class Manifest(FrozenModel):
    """What an artifact directory holds."""

    kind: str
    format_version: int
    content_hash: str
    files: dict[str, FileEntry]
    metadata: dict[str, Any] = Field(default_factory=dict)


_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=str)


def content_digest(*parts: object) -> str:
    """Return the SHA-256 of JSON-able values and byte strings, independent of dict order."""
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else _CANONICAL.encode(part).encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def core_digest() -> str:
    """Return a digest of this package's source, for caches that must notice code changes."""
    root = Path(__file__).parent
    return content_digest(
        *(
            part
            for path in sorted(root.rglob("*.py"))
            for part in (str(path.relative_to(root)), path.read_bytes())
        )
    )


def atomic_write(path: Path, data: bytes | str) -> Path:
    """Write a file so that it has either its old or its whole new content, whatever happens.

    Raises:
        ArtifactError: ``path`` is there and is no file.
        OSError: It cannot be written; the error names ``path``.
    """
    with _file_beside(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)
        file.flush()
        os.fsync(file.fileno())
        Path(file.name).chmod(0o644)
        Path(file.name).replace(path)
        _fsync_directory(path.parent)
    return path


def check_writable(path: Path) -> None:
    """Refuse what `atomic_write` would, before the work whose result is to be written."""
    with _file_beside(path):
        pass


@contextmanager
def new_artifact(
    path: Path,
    *,
    kind: str,
    format_version: int,
    metadata: dict[str, Any] | None = None,
) -> Iterator[Path]:
    """Give a scratch directory that becomes the artifact ``path`` when the block succeeds.

    Args:
        path: Final directory; an existing artifact there is replaced.
        kind: What it is, checked by `read_manifest`.
        format_version: Version of its layout, checked by `read_manifest`.
        metadata: JSON-able values for the manifest; entries may be added inside the block.

    Yields:
        The scratch directory, beside ``path`` on the same file system; removed on any error.

    Raises:
        ArtifactError: As `check_replaceable`.
    """
    check_replaceable(path, kind=kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield scratch
        _write_manifest(scratch, kind, format_version, metadata or {})
        scratch.chmod(0o755)
        _replace_directory(scratch, path)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def check_replaceable(path: Path, *, kind: str) -> None:
    """Refuse to write an artifact where something else stands.

    Raises:
        ArtifactError: ``path`` is neither an empty folder nor an artifact of this kind, it holds
            files that its manifest does not list, or it is a folder that cannot be replaced.
    """
    place = path.resolve()
    if (current := Path.cwd().is_relative_to(place)) or place.is_mount():
        what = "the current folder" if current else "where a file system is mounted"
        raise ArtifactError(
            f"{path} is {what}, which cannot be replaced; give a folder in it for the {kind}"
        )
    if not path.exists() or (path.is_dir() and _is_empty(path)):
        return
    try:
        manifest = Manifest.model_validate_json((path / MANIFEST_NAME).read_bytes())
    except (OSError, ValidationError):
        manifest = None
    if manifest is None or manifest.kind != kind:
        raise ArtifactError(
            f"{path} is there and is no {kind}, so it is not replaced; give another folder for the "
            f"{kind} or remove it"
        )
    foreign = [name for name in _files(path) if name not in {MANIFEST_NAME, *manifest.files}]
    if foreign:
        raise ArtifactError(
            f"{path} also holds {foreign[0]}, which is no part of the {kind} there, so it is not "
            f"replaced; give another folder for the {kind} or move that file"
        )


def read_manifest(path: Path, *, kind: str, format_version: int) -> Manifest:
    """Read and check an artifact's manifest without touching its data files' contents.

    Raises:
        ArtifactError: No such artifact, damaged manifest, other kind or version, or a file whose
            size differs from the manifest's.
    """
    file = path / MANIFEST_NAME
    if not file.is_file():
        raise ArtifactError(f"{path} is no {kind}: it has no {MANIFEST_NAME}")
    try:
        manifest = Manifest.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise ArtifactError(f"{file} is damaged: {error.errors()[0]['msg']}") from None
    if manifest.kind != kind:
        raise ArtifactError(f"{path} holds a {manifest.kind}, not a {kind}")
    if manifest.format_version != format_version:
        raise ArtifactError(
            f"{path} has format version {manifest.format_version}, this program reads "
            f"{format_version}; write the {kind} again"
        )
    for name, entry in manifest.files.items():
        data = path / name
        size = data.stat().st_size if data.is_file() else None
        if size != entry.num_bytes:
            state = "missing" if size is None else f"{size:,} bytes"
            raise ArtifactError(
                f"{data} is {state} but its manifest says {entry.num_bytes:,} bytes; "
                f"write the {kind} again"
            )
    return manifest


def verify_artifact(path: Path, manifest: Manifest) -> None:
    """Read every file and compare hashes.

    Raises:
        ArtifactError: A file's content differs from the manifest's.
    """
    for name, entry in manifest.files.items():
        if _file_sha256(path / name) != entry.sha256:
            raise ArtifactError(
                f"{path / name} is damaged: its content differs from its manifest; "
                f"write the {manifest.kind} again"
            )


def _write_manifest(
    directory: Path, kind: str, format_version: int, metadata: dict[str, Any]
) -> None:
    files = {
        name: FileEntry(
            sha256=_file_sha256(directory / name), num_bytes=(directory / name).stat().st_size
        )
        for name in _files(directory)
    }
    hashes = {name: entry.sha256 for name, entry in files.items()}
    manifest = Manifest(
        kind=kind,
        format_version=format_version,
        content_hash=content_digest(kind, format_version, hashes),
        files=files,
        metadata=metadata,
    )
    atomic_write(directory / MANIFEST_NAME, manifest.model_dump_json(indent=1) + "\n")


def _replace_directory(scratch: Path, path: Path) -> None:
    # A directory cannot be renamed over a non-empty one: the old one steps aside first.
    old: Path | None = None
    if path.exists():
        old = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.old."))
        path.rename(old / "old")
    scratch.rename(path)
    _fsync_directory(path.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _file_beside(path: Path) -> Iterator[IO[bytes]]:
    """Give a new file in the folder of ``path``, which is gone behind the block."""
    if path.exists() and not path.is_file():
        what = "folder" if path.is_dir() else "pipe or device"
        raise ArtifactError(f"{path} is a {what}, which is not replaced; name a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            try:
                yield file
            finally:
                Path(file.name).unlink(missing_ok=True)
    except OSError as error:
        # The name that people gave, not that of the file beside it.
        raise OSError(error.errno, error.strerror, str(path)) from error


def _files(directory: Path) -> list[str]:
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    return [str(file.relative_to(directory)) for file in files]


def _is_empty(directory: Path) -> bool:
    return next(directory.iterdir(), None) is None


def _file_sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
