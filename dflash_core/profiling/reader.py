"""Lengths out of token data on disk: Parquet, Arrow, JSON lines, CSV, or a token store.

Polars streams the files and hands back one row per distinct length, so memory does not grow with
the number of samples. Of a file with a length column, tokens are not read, but for a few rows that
lie evenly over it: their ids must be as many as the column says.
"""

import glob
import io
from collections.abc import Iterable, Iterator
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dflash_core.artifacts import MANIFEST_NAME
from dflash_core.config import FrozenModel
from dflash_core.contents import DAMAGES, PEEKED_BYTES, format_suffix, open_contents
from dflash_core.errors import DataError
from dflash_core.profiling.counting import profile_of_counts
from dflash_core.profiling.profile import LengthProfile
from dflash_core.profiling.screening import ABSURD_LENGTH, Oversize, check_max_length

if TYPE_CHECKING:
    import polars as pl

__all__ = ["TokenColumns", "profile_data", "read_lengths"]

PARQUET, ARROW, JSON_LINES, CSV = (
    (".parquet", ".pq"),
    (".arrow", ".ipc", ".feather"),
    (".jsonl", ".ndjson"),
    (".csv", ".tsv"),
)
SUFFIXES = (*PARQUET, *ARROW, *JSON_LINES, *CSV)
PROFILE_SUFFIX = ".json"
ARROW_MAGIC = b"ARROW1"
CHECKED_RUNS, CHECKED_ROWS = 8, 64  # of a file with lengths and ids


class TokenColumns(FrozenModel):
    """Names of the columns of token data; only tokens or lengths must be there."""

    length: str = "length"
    """Tokens of each sample, read instead of the tokens themselves where it exists."""
    tokens: str = "input_ids"
    """Token ids of each sample."""
    supervised: str = "supervised"
    """Supervised tokens of each sample, read instead of the mask where it exists."""
    mask: str = "loss_mask"
    """Supervision of each token: booleans, or 0 and 1."""
    domain: str = "domain"
    """Where the sample came from."""


def profile_data(
    paths: Iterable[Path],
    *,
    max_length: int | None = None,
    oversize: Oversize = "drop",
    columns: TokenColumns | None = None,
) -> LengthProfile:
    """Profile token data in files, folders of files, or token stores.

    Args:
        paths: Files by suffix (.parquet, .arrow, .jsonl, ...), folders of such, token stores; and
            saved profiles (.json), which are merged.
        max_length: Longest usable sample in tokens.
        oversize: What happens to longer samples and to unusable lengths; each is counted.
        columns: Names of the columns.

    Raises:
        ConfigError: ``max_length`` leaves no length.
        DataError: No such file, an unknown suffix, no usable column, a damaged file, or a bad
            length under ``error``.
    """
    check_max_length(max_length)
    names = TokenColumns() if columns is None else columns
    given = [Path(path) for path in paths]
    saved = [path for path in given if path.suffix == PROFILE_SUFFIX and path.is_file()]
    parts = [_load_profile(path, max_length) for path in saved]
    for file in token_files(path for path in given if path not in saved):
        tables = _counted(file, names, max_length if oversize == "truncate" else None)
        parts += [
            profile_of_counts(
                part["length"].to_list(),
                part["count"].to_list(),
                part["supervised"].fill_null(0).to_list(),
                domain=part["domain"][0],
                max_length=max_length,
                oversize=oversize,
            )
            for table in tables
            for part in table.partition_by("domain", maintain_order=True)
        ]
    if not parts:
        raise DataError(f"{', '.join(map(str, given))} hold no samples; give token data")
    return reduce(LengthProfile.merge, parts)


def read_lengths(
    path: Path, *, columns: TokenColumns | None = None
) -> tuple[NDArray[Any], NDArray[np.int64] | None]:
    """Return the length and, where known, the supervised tokens of every sample.

    Args:
        path: As for `profile_data`, or a ``.npy`` file of lengths.
        columns: Names of the columns.

    Returns:
        Lengths, shape ``(num_samples,)``, object dtype with None where one is missing; supervised
        tokens, same shape, or None.

    Raises:
        DataError: As `profile_data`.
    """
    if path.suffix == ".npy":
        return _load_array(path), None
    names = TokenColumns() if columns is None else columns
    tables = [
        _collect(_measures(frame, file, names, None), file)
        for file in token_files([path])
        for frame in _frames(file)
    ]
    if not tables:
        raise DataError(f"{path} holds no samples; give token data")
    lengths = np.concatenate([_with_missing(table["length"]) for table in tables])
    if any(table["supervised"].null_count() for table in tables):
        return lengths, None
    return lengths, np.concatenate([table["supervised"].to_numpy() for table in tables])


def token_files(paths: Iterable[Path]) -> list[Path]:
    """Return the data files under paths, in a stable order.

    Raises:
        DataError: No such file, or no file of a known suffix.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise DataError(f"{path} does not exist; give token data or a token store")
        own = [path]
        if path.is_dir():
            own = sorted(file for file in path.rglob("*") if _is_data(file))
        if not own or format_suffix(own[0]) not in SUFFIXES:
            raise DataError(
                f"{path} holds no token data; give {', '.join(SUFFIXES)}, packed or not, or a store"
            )
        found += own
    return found


def _is_data(file: Path) -> bool:
    """Whether a file below a folder holds samples: of a token store, only its shards do."""
    if (
        format_suffix(file) not in SUFFIXES or file.is_dir()
    ):  # datasets are saved as folders x.parquet
        return False
    return file.match("shard-*.arrow") or not (file.parent / MANIFEST_NAME).is_file()


def _frames(file: Path) -> "Iterator[pl.LazyFrame]":
    """Scan a file; one in Arrow's stream format, as datasets are saved, comes in its batches."""
    import polars as pl
    import pyarrow as pa

    try:
        with open_contents(file) as contents:
            head = contents.stream.peek(PEEKED_BYTES)
            # A name may hold brackets, and is no pattern.
            source: Any = glob.escape(str(file))
            if contents.packed:  # all of it in memory
                source = io.BytesIO(contents.stream.read())
            if contents.suffix in PARQUET:
                yield pl.scan_parquet(source)
            elif contents.suffix in JSON_LINES:
                # Types of the whole file: a column may first appear, or be filled, far down.
                if head:
                    yield pl.scan_ndjson(source, infer_schema_length=None)
            elif contents.suffix in CSV:
                yield _csv_frame(source, head, "\t" if contents.suffix == ".tsv" else ",")
            elif head.startswith(ARROW_MAGIC):
                yield pl.scan_ipc(source)
            else:
                with pa.ipc.open_stream(source if contents.packed else contents.stream) as batches:
                    yield from (pl.DataFrame(batch).lazy() for batch in batches)
    except (*DAMAGES, pa.ArrowException) as error:
        if isinstance(error, OSError) and error.errno:  # the disk, the network, rights
            raise OSError(error.errno, error.strerror, str(file)) from None
        raise DataError(f"{file} is damaged: {_first_line(error)}") from None


def _csv_frame(source: Any, head: bytes, separator: str) -> "pl.LazyFrame":
    """Scan a table of text, whose first line names its columns unless it is numbers alone."""
    import polars as pl

    first = head.removeprefix(b"\xef\xbb\xbf").partition(b"\n")[0].decode(errors="replace")
    names = [name.strip().strip('"') for name in first.split(separator)]
    named = not all(name.lstrip("-").isdecimal() for name in names)
    return pl.scan_csv(source, separator=separator, has_header=named, infer_schema_length=None)


def _counted(file: Path, names: TokenColumns, limit: int | None) -> "list[pl.DataFrame]":
    """Return samples and supervised tokens of each domain and length: one table, or none."""
    import polars as pl

    def counted(frame: pl.LazyFrame) -> pl.DataFrame:
        groups = frame.group_by("domain", "length")
        table = groups.agg(pl.col("count").sum(), pl.col("supervised").sum())
        # Groups come in any order, and of several bad lengths the first is told.
        return _collect(table.sort("domain", "length"), file)

    one = pl.lit(1, dtype=pl.Int64).alias("count")
    parts = [
        counted(_measures(frame, file, names, limit).with_columns(one)) for frame in _frames(file)
    ]
    return parts if len(parts) < 2 else [counted(pl.concat(parts).lazy())]


def _measures(
    frame: "pl.LazyFrame", file: Path, names: TokenColumns, limit: int | None
) -> "pl.LazyFrame":
    """Return length, supervised and domain of every sample of a file, lazily."""
    import polars as pl

    try:
        schema = frame.collect_schema()
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(f"{file} is damaged: {_first_line(error)}") from None
    for option, name in names.model_dump(exclude_defaults=True).items():
        if name not in schema:
            raise DataError(
                f"{file} has no column '{name}' (--{option}-column) but {', '.join(schema)}"
            )
    tokens = _list_of(schema, names.tokens)
    column = names.length
    unnamed = column == TokenColumns().length and column not in schema and len(schema) == 1
    if unnamed and schema.dtypes()[0].is_numeric():
        (column,) = schema  # a file of nothing but lengths
    if column in schema:
        length = _whole(frame, column, schema[column], file)
        if tokens is not None:
            _check_lengths(frame.select(told=length, held=tokens.list.len()), file, column, names)
    elif tokens is not None:
        # Padding is no token, here and where such rows are prepared.
        real = _list_of(schema, "attention_mask")
        length = tokens.list.len().cast(pl.Int64)
        if real is not None:
            length = pl.coalesce(real.list.sum().cast(pl.Int64), length)
    else:
        raise DataError(
            f"{file} has neither a column '{names.length}' nor lists in '{names.tokens}' but "
            f"{', '.join(schema)}; name its columns with --length-column or --tokens-column"
        )
    domain = pl.lit("") if names.domain not in schema else pl.col(names.domain).cast(pl.String)
    return frame.select(
        length=length,
        supervised=_supervised(schema, names, limit),
        domain=domain.fill_null(""),
    )


def _check_lengths(counts: "pl.LazyFrame", file: Path, column: str, names: TokenColumns) -> None:
    """Refuse a length column that says otherwise than the ids.

    Of JSON lines, which are parsed anyhow, all rows are looked at; else runs of rows, evenly
    over the file (in Arrow's stream format over each batch, from which its rows are counted).
    """
    import polars as pl

    runs = [counts.with_row_index("row")]
    if format_suffix(file) not in JSON_LINES:  # of which each run would be read from the start
        num_rows = _collect(counts.select(pl.len()), file).item()
        step = max(num_rows // CHECKED_RUNS, CHECKED_ROWS)
        starts = range(0, num_rows, step)
        runs = [counts.slice(k, CHECKED_ROWS).with_row_index("row", offset=k) for k in starts]
    differs = pl.col("told") != pl.col("held")
    for run in runs:
        for row, told, held in _collect(run.filter(differs).head(1), file).rows():
            raise DataError(
                f"row {row} of {file} has length {told:,} in column '{column}' but {held:,} ids in "
                f"'{names.tokens}'; name another column with --length-column, or rename this one"
            )


def _list_of(schema: "pl.Schema", name: str) -> "pl.Expr | None":
    """Return a column of lists, whether of fixed size or not; None when it is none."""
    import polars as pl

    dtype = schema.get(name)
    if isinstance(dtype, pl.Array):
        return pl.col(name).arr.to_list()
    return pl.col(name) if isinstance(dtype, pl.List) else None


def _supervised(schema: "pl.Schema", names: TokenColumns, limit: int | None) -> "pl.Expr":
    import polars as pl

    mask = _list_of(schema, names.mask)
    if mask is not None and (limit is not None or names.supervised not in schema):
        return (mask if limit is None else mask.list.head(limit)).list.sum().cast(pl.Int64)
    if names.supervised in schema:
        counted = pl.col(names.supervised).cast(pl.Int64)
        return counted if limit is None else counted.clip(upper_bound=limit)
    if (labels := _list_of(schema, "labels")) is not None:
        labels = labels if limit is None else labels.list.head(limit)
        return labels.list.len().cast(pl.Int64) - labels.list.count_matches(-100).cast(pl.Int64)
    return pl.lit(None, dtype=pl.Int64)


def _whole(frame: "pl.LazyFrame", name: str, dtype: "pl.DataType", file: Path) -> "pl.Expr":
    """Return a numeric column as int64, with what int64 cannot hold bounded."""
    import polars as pl

    column = pl.col(name)
    if dtype.is_integer():
        wide = dtype in (pl.UInt64, pl.Int128, pl.UInt128)
        held = column.cast(pl.Int128).clip(-ABSURD_LENGTH, ABSURD_LENGTH + 1) if wide else column
        return held.cast(pl.Int64)
    if dtype == pl.Null:
        return column.cast(pl.Int64)
    if not dtype.is_numeric():
        raise DataError(f"column '{name}' of {file} is of type {dtype}; give whole numbers")
    column = column.cast(pl.Float64)
    broken = frame.select((column.is_finite() & (column != column.floor())).sum())
    if count := _collect(broken, file).item():
        raise DataError(f"column '{name}' of {file} has {count:,} fractions; give whole numbers")
    return column.fill_nan(None).clip(-ABSURD_LENGTH, ABSURD_LENGTH + 1).cast(pl.Int64)


def _collect(frame: "pl.LazyFrame", file: Path) -> "pl.DataFrame":
    import polars as pl

    try:
        return frame.collect(engine="streaming")
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(f"{file} is damaged: {_first_line(error)}") from None


def _with_missing(lengths: "pl.Series") -> NDArray[Any]:
    return np.array(lengths.to_list(), dtype=object) if lengths.null_count() else lengths.to_numpy()


def _load_profile(path: Path, max_length: int | None) -> LengthProfile:
    try:
        profile = LengthProfile.from_json(path.read_bytes())
        if "domains" not in profile.model_fields_set:
            raise ValueError("no domains")
    except ValueError:
        raise DataError(
            f"{path} holds no saved profile; give token data or what profile --save wrote"
        ) from None
    if max_length is not None and profile.max_length != max_length:
        raise DataError(
            f"the profile {path} was made with max_length {profile.max_length}, not {max_length}; "
            "profile its data again"
        )
    return profile


def _load_array(path: Path) -> NDArray[Any]:
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} is no .npy file of lengths: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
