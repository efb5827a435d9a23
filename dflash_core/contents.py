"""What a data file holds, told by its first bytes: names lie, and failed downloads leave pages."""

import bz2
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dflash_core.errors import DataError

__all__ = [
    "COMPRESSED",
    "DAMAGES",
    "PEEKED_BYTES",
    "Contents",
    "format_suffix",
    "open_contents",
]

COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
# What reading a compressed file that is cut or broken raises.
DAMAGES = (OSError, EOFError, zlib.error, lzma.LZMAError)
PEEKED_BYTES = 1 << 10


def _zstandard(stream: Any) -> io.BufferedReader:
    import pyarrow as pa

    return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(stream, "r"), "zstd"))  # type: ignore[arg-type]


_UNPACKERS: dict[bytes, Callable[[Any], Any]] = {
    rb"\x1f\x8b": lambda stream: gzip.GzipFile(fileobj=stream),
    rb"\x28\xb5\x2f\xfd": _zstandard,
    rb"BZh[1-9]1AY&SY": bz2.BZ2File,
    rb"\xfd7zXZ\0": lzma.LZMAFile,
}
_KINDS = {rb"PAR1": ".parquet", rb"ARROW1|\xff\xff\xff\xff": ".arrow"}
_REFUSED = {
    rb"version https://git-lfs": "a pointer of Git LFS, not the file; get it with 'git lfs pull'",
    rb"\s*(?i:<!doctype html|<html|<head)": "a web page, as failed downloads leave; get the file",
    rb"PK\x03\x04|PK\x05\x06": "a ZIP archive; unpack it",
    rb"(?s:.{257})ustar": "a tar archive; unpack it",
    rb"SQLite format 3\0": "an SQLite database; write its rows to JSONL or Parquet",
    rb"FEA1": "a Feather file of version 1; write it as Parquet",
    rb"\xff\xfe|\xfe\xff": "UTF-16, not UTF-8; convert it",
}


class Contents(NamedTuple):
    """An open file.

    Attributes:
        stream: Its bytes, unpacked.
        suffix: The suffix of what it holds: of tables by their bytes, else that of its name.
        packed: Whether it lies compressed, so that others cannot read it by its name.
    """

    stream: io.BufferedReader
    suffix: str
    packed: bool


@contextmanager
def open_contents(path: Path) -> Iterator[Contents]:
    """Open a file for reading, whatever compresses it.

    Raises:
        DataError: It holds no data but a pointer, a web page or an archive.
        OSError: It cannot be read, as those of `DAMAGES` while it is read.
    """
    with ExitStack() as stack:
        stream: Any = stack.enter_context(path.open("rb"))
        packed = False
        while unpack := _first(_UNPACKERS, head := stream.peek(PEEKED_BYTES)):
            stream, packed = stack.enter_context(unpack(stream)), True
        if refused := _first(_REFUSED, head):
            raise DataError(f"{path} is {refused}")
        yield Contents(stream, _first(_KINDS, head) or format_suffix(path), packed)


def format_suffix(path: Path) -> str:
    """Return the suffix of a file's name that tells its format, in small letters."""
    if path.suffix.lower() in COMPRESSED:
        path = path.with_suffix("")
    return path.suffix.lower()


def _first(table: dict[bytes, Any], head: bytes) -> Any:
    return next((found for pattern, found in table.items() if re.match(pattern, head)), None)
