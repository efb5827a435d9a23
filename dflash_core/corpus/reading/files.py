"""Rows of chat files, whatever holds them: JSONL, a JSON array, Parquet, Arrow, CSV, compressed.

Files are streamed; a row that cannot be read becomes a `RawRow` with an error, and reading goes on.
A file that cannot be read to its end is refused, since nobody knows what it held. What a ``.json``
file holds is decided by its content, since half of them are JSONL.
"""

import csv
import hashlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from dflash_core.artifacts import MANIFEST_NAME
from dflash_core.contents import COMPRESSED, DAMAGES, format_suffix, open_contents
from dflash_core.errors import DataError

__all__ = ["RawRow", "file_hashes", "find_files", "iter_rows", "parse_row", "stem_of"]

TABLES = (".parquet", ".pq", ".arrow", ".ipc", ".feather")
SUFFIXES = (".jsonl", ".ndjson", ".json", ".traj", *TABLES, ".csv", ".tsv", ".txt")
BLOCK_BYTES = 1 << 20
ROWS_OF_A_BATCH = 1_024
# What preparation writes beside its store, which may lie among the chats.
OWN_SUFFIXES = (".rejects.jsonl", ".regenerated.jsonl")


class RawRow(NamedTuple):
    """One row of a file, parsed or not.

    Attributes:
        number: Line of the file, or row of the table, counted from 1; 0 is the file as a whole.
        data: JSON bytes still to be parsed, or the row's value.
        error: Why there is no value.
    """

    number: int
    data: Any = None
    error: str | None = None


def find_files(inputs: Sequence[Path]) -> tuple[list[Path], list[tuple[Path, str]]]:
    """Return the chat files that files, folders and globs name, and what there cannot be read.

    Order: as given, folders and globs sorted; a file named twice counts once. Stores within a
    folder, and what was written beside them, are no chats.

    Raises:
        DataError: An input does not exist, or nothing in it looks like a chat file.
    """
    found: dict[Path, None] = {}
    refused: list[tuple[Path, str]] = []
    for given in inputs:
        before = len(found) + len(refused)
        if given.is_dir():
            found.update(dict.fromkeys(_walk(given, refused)))
        elif given.exists():
            found[given] = None
        elif any(character in str(given) for character in "*?["):
            base = Path(given.anchor) if given.is_absolute() else Path()
            pattern = str(given.relative_to(base))
            found.update(dict.fromkeys(sorted(p for p in base.glob(pattern) if p.is_file())))
        if len(found) + len(refused) == before and given not in found:
            raise DataError(
                f"{given} names no chat file; give existing files, folders or globs of "
                f"{', '.join(SUFFIXES)} (also {' and '.join(COMPRESSED)})"
            )
    return list(found), refused


def file_hashes(inputs: Sequence[Path]) -> dict[Path, str]:
    """Return the SHA-256 of each chat file that files, folders and globs name, in order.

    Raises:
        DataError: As `find_files`, or a file can be read only once and would then be empty.
    """
    hashes: dict[Path, str] = {}
    for file in find_files(inputs)[0]:
        if not file.is_file():
            raise DataError(
                f"{file} is a pipe or the like, which gives its rows only once, but here they are "
                "hashed before they are read; write them to a file first"
            )
        with file.open("rb") as stream:
            hashes[file] = hashlib.file_digest(stream, "sha256").hexdigest()
    return hashes


@lru_cache(maxsize=4_096)
def stem_of(path: Path) -> str:
    """Return a file's name without compression and format suffixes."""
    name = path.name
    for suffixes in (COMPRESSED, SUFFIXES):
        for suffix in suffixes:
            name = name.removesuffix(suffix)
    return name or path.name


def iter_rows(path: Path) -> Iterator[RawRow]:
    """Yield the rows of one file; a row that cannot be read tells so in its ``error``.

    Raises:
        DataError: The file cannot be read to its end, or holds no rows at all.
    """
    number = None
    try:
        for row in _open_rows(path):
            number = row.number
            yield row
        if number is None:
            yield RawRow(0, error="is empty")
    except (*DAMAGES, pa.ArrowException, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        where = f" after row {number:,}" if number else ""
        raise DataError(
            f"{path} cannot be read{where}: {reason}; get it anew or leave it out of the inputs"
        ) from None


def parse_row(row: RawRow) -> RawRow:
    """Parse a row's JSON bytes, if that is what it holds."""
    if not isinstance(row.data, bytes):
        return row
    try:
        return RawRow(row.number, json.loads(row.data.decode()))
    except UnicodeDecodeError as error:
        byte = row.data[error.start]
        return RawRow(row.number, error=f"is not UTF-8: byte 0x{byte:02x} at {error.start}")
    except (ValueError, RecursionError) as error:
        return RawRow(row.number, error=f"is not valid JSON: {error}")


def _walk(folder: Path, refused: list[tuple[Path, str]]) -> Iterator[Path]:
    def on_error(error: OSError) -> None:
        refused.append((Path(error.filename), error.strerror or "cannot be read"))

    walked: set[str] = set()
    for root, folders, names in os.walk(folder, onerror=on_error, followlinks=True):
        real = os.path.realpath(root)
        if real in walked or MANIFEST_NAME in names:  # a circle of links, or a store
            folders.clear()
            continue
        walked.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(root) / name
            if name.startswith(".") or name.endswith(OWN_SUFFIXES):
                continue
            if format_suffix(path) not in SUFFIXES:
                continue
            if path.exists():
                yield path
            else:
                refused.append((path, "a link to nothing"))


@contextmanager
def _text(stream: Any) -> Iterator[io.TextIOWrapper]:
    """Decode anything; bytes that are no UTF-8 become lone surrogates, which the encoder names."""
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    try:
        yield text
    finally:
        text.detach()


def _open_rows(path: Path) -> Iterator[RawRow]:
    with open_contents(path) as contents:
        yield from _READERS.get(contents.suffix, _json_rows)(contents.stream)


def _text_row(stream: IO[bytes]) -> Iterator[RawRow]:
    with _text(stream) as text:
        content = text.read()
    if content:
        yield RawRow(1, {"text": content})


def _json_rows(stream: IO[bytes]) -> Iterator[RawRow]:
    """Yield the rows of JSONL, of a JSON array, or the one value of a JSON document."""
    first = b""
    while not first.strip() and (line := stream.readline()):
        first = line.removeprefix(b"\xef\xbb\xbf")
    if not first.strip():
        return
    value, complete = _try_json(first)
    second = stream.readline()
    array = first.lstrip().startswith(b"[")
    if complete and not (array and not second.strip() and not _is_chat(value)):
        yield from _json_lines(stream, [first, second])
    elif array:
        yield from _array_rows(stream, first + second)
    elif second.strip() and not second.lstrip().startswith((b"{", b"[")):
        yield from _document(stream, first + second)
    else:
        yield from _json_lines(stream, [first, second])


def _try_json(data: bytes) -> tuple[Any, bool]:
    try:
        return json.loads(data), True
    except (ValueError, RecursionError):
        return None, False


def _is_chat(value: Any) -> bool:
    """Say whether a list is one conversation rather than a list of rows."""
    return bool(value) and all(
        isinstance(item, dict) and ("role" in item or "from" in item) for item in value
    )


def _json_lines(stream: IO[bytes], head: Sequence[bytes]) -> Iterator[RawRow]:
    # Bytes are cut at line feeds only: U+2028 inside a string is no line end.
    for number, line in enumerate(chain(head, stream), start=1):
        if line.strip():
            yield RawRow(number, line)


def _document(stream: IO[bytes], head: bytes) -> Iterator[RawRow]:
    """Yield a whole JSON document as one row, or its lines where it is none."""
    data = head + stream.read()
    value, complete = _try_json(data)
    if complete:
        yield RawRow(1, value)
    else:
        yield from _json_lines(io.BytesIO(data), [])


def _array_rows(stream: IO[bytes], head: bytes) -> Iterator[RawRow]:
    """Yield the items of a JSON array without holding it as a whole."""
    with _text(io.BufferedReader(_Chained(head, stream), BLOCK_BYTES)) as text:
        yield from _items(text)


def _items(text: IO[str]) -> Iterator[RawRow]:
    decoder = json.JSONDecoder()
    number, ended = 0, False
    buffer = text.read(BLOCK_BYTES).lstrip()[1:]
    while True:
        buffer = buffer.lstrip(" \t\r\n,")
        if buffer.startswith("]"):
            return
        try:
            item, end = decoder.raw_decode(buffer)
            # A number at the end of the buffer may go on in the next block.
            if end == len(buffer) and not ended:
                raise ValueError
        except (ValueError, RecursionError) as error:
            if ended:
                reason = f"array is not valid JSON from its item {number + 1} on: {error}"
                raise EOFError(reason) from None
            more = text.read(max(BLOCK_BYTES, len(buffer)))
            ended = not more
            buffer += more
            continue
        number += 1
        yield RawRow(number, item)
        buffer = buffer[end:]


class _Chained(io.RawIOBase):
    """Bytes already read, then the rest of the stream."""

    def __init__(self, head: bytes, stream: IO[bytes]) -> None:
        self._head = io.BytesIO(head)
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._head.read(len(buffer)) or self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _parquet_rows(stream: IO[bytes]) -> Iterator[RawRow]:
    source = stream if stream.seekable() else io.BytesIO(stream.read())
    yield from _table_rows(pq.ParquetFile(source).iter_batches(batch_size=ROWS_OF_A_BATCH))


def _arrow_rows(stream: IO[bytes]) -> Iterator[RawRow]:
    """Yield the rows of an Arrow file or, as the datasets library writes, an Arrow stream."""
    source = stream if stream.seekable() else io.BytesIO(stream.read())
    try:
        reader = pa.ipc.open_file(source)
        batches = (reader.get_batch(k) for k in range(reader.num_record_batches))
    except pa.ArrowInvalid:
        source.seek(0)
        batches = iter(pa.ipc.open_stream(source))
    yield from _table_rows(
        batch.slice(start, ROWS_OF_A_BATCH)
        for batch in batches
        for start in range(0, batch.num_rows, ROWS_OF_A_BATCH)
    )


def _table_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[RawRow]:
    """Yield the rows of a table without the nulls by which Arrow gives all structs one shape."""
    number = 0
    for batch in batches:
        shaped = [field.name for field in batch.schema if "struct<" in str(field.type)]
        for value in batch.to_pylist():
            number += 1
            yield RawRow(number, value | {name: _without_nulls(value[name]) for name in shaped})


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value


def _csv_rows(stream: IO[bytes], delimiter: str = ",") -> Iterator[RawRow]:
    csv.field_size_limit(sys.maxsize)
    with _text(stream) as text:
        for number, row in enumerate(csv.DictReader(text, delimiter=delimiter), start=1):
            if None in row or None in row.values():
                yield RawRow(number, error="has another number of fields than the header")
            else:
                yield RawRow(number, row)


# By suffix, of tables as told by their bytes; all else is JSON in one of its forms.
_READERS: dict[str, Callable[[IO[bytes]], Iterator[RawRow]]] = {
    ".parquet": _parquet_rows,
    ".pq": _parquet_rows,
    **dict.fromkeys((".arrow", ".ipc", ".feather"), _arrow_rows),
    ".csv": _csv_rows,
    ".tsv": partial(_csv_rows, delimiter="\t"),
    ".txt": _text_row,
}
