"""Parts to a store: duplicates and leaks left out, ids made unique, everything counted."""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from dflash_core.artifacts import atomic_write, new_artifact
from dflash_core.config import FrozenModel
from dflash_core.corpus.config import PrepareConfig
from dflash_core.corpus.part import PROVENANCE, PartSummary, Reject, read_part
from dflash_core.corpus.store import SCHEMA, STORE_KIND, STORE_VERSION, ShardWriter, TokenStore
from dflash_core.errors import ArtifactError, DataError

__all__ = ["PrepareReport", "Selection", "assemble", "find_leaks"]

PROVENANCE_NAME = "provenance.arrow"
REJECTS_NAME = "rejects.jsonl"


class Selection(FrozenModel):
    """Which samples a store takes."""

    side: Literal["all", "train", "held_out"] = "all"
    """All, or one side of the split by conversation tree and content."""
    held_out_percent: float = Field(default=5.0, gt=0, lt=100)
    """Share of groups held out, by a hash."""
    held_out_store: Path | None = None
    """A held-out store whose conversations and trees are left out here."""
    max_samples: int | None = Field(default=None, ge=1)
    """Most samples, those with the smallest content hashes."""


class PrepareReport(FrozenModel):
    """What became of the rows."""

    num_files: int
    """Files with at least one row."""
    num_rows: int
    """Rows read, the unreadable ones included."""
    num_samples: int
    """Samples in the store."""
    num_tokens: int
    """Their tokens."""
    num_supervised: int
    """Their supervised tokens."""
    formats: dict[str, dict[str, int]]
    """Rows by file and by the format they were taken for."""
    num_rejects: int
    """Rows refused, or threads of a tree, each named in rejects.jsonl."""
    num_rejected_rows: int
    """Rows of which at least one thread was refused."""
    reject_reasons: dict[str, int]
    """Refused rows by reason, numbers and names left out."""
    num_duplicates: int
    """Samples that said exactly what an earlier one had said."""
    num_leaks: int
    """Samples left out because their conversation or tree is held out."""
    num_other_side: int
    """Samples of the other side of the split, or beyond max_samples."""
    num_renamed: int
    """Samples whose id had occurred before; they got a number."""
    max_length: int
    """The limit in tokens."""
    num_truncated: int
    """Samples cut at the limit, before selection."""
    truncated_tokens: int
    """Tokens cut off."""
    truncated_supervised: int
    """Supervised tokens cut off."""
    render_s: float = 0.0
    """Worker seconds of parsing, rendering and finding answers."""
    tokenise_s: float = 0.0
    """Worker seconds in the tokenizer."""

    @property
    def reject_share(self) -> float:
        """Refused rows as a share of all rows."""
        return self.num_rejected_rows / max(self.num_rows, 1)


def assemble(
    parts: Sequence[Path],
    out: Path,
    config: PrepareConfig,
    selection: Selection,
    *,
    facts: Mapping[str, Any],
) -> PrepareReport:
    """Write the store of some parts.

    Args:
        parts: Finished parts, in order.
        out: Store directory.
        config: The settings the parts were made with.
        selection: Which samples are stored.
        facts: Further entries of the store's manifest.

    Raises:
        DataError: No sample is left, or more rows were refused than allowed.
    """
    read = [_read(part) for part in parts]
    summaries = [summary for summary, _ in read]
    tables = [table for _, table in read]
    rejects = [reject for summary in summaries for reject in summary.rejects]
    report = _count(summaries, rejects, config)
    lines = "".join(reject.model_dump_json() + "\n" for reject in rejects)
    beside = out.with_name(f"{out.name}.{REJECTS_NAME}")
    beside.unlink(missing_ok=True)
    if report.reject_share > config.max_reject_share:
        atomic_write(beside, lines)
        reason, count = max(report.reject_reasons.items(), key=lambda item: item[1])
        raise DataError(
            f"{report.num_rejected_rows:,} of {report.num_rows:,} rows were refused "
            f"({report.reject_share:.1%}), more than max_reject_share {config.max_reject_share}; "
            f"the commonest of the reasons in {beside} ({count:,} rows) is: {reason}"
        )
    keep, dropped = _choose(tables, selection)
    num_samples = int(np.count_nonzero(keep))
    if num_samples == 0:
        atomic_write(beside, lines)
        raise DataError(
            f"no sample is left for {out} of {report.num_rows:,} rows: {report.num_rejects:,} were "
            f"refused (see {beside}), {dropped['duplicates']:,} were duplicates; check the inputs "
            "and the selection"
        )
    ids, num_renamed = _unique_ids(tables, keep)
    entries = {**facts, "config": config.model_dump(mode="json")}
    with new_artifact(
        out, kind=STORE_KIND, format_version=STORE_VERSION, metadata=entries
    ) as folder:
        _write_tables(folder, tables, keep, ids)
        (folder / REJECTS_NAME).write_text(lines, encoding="utf-8")
        report = report.model_copy(
            update={
                "num_samples": num_samples,
                "num_tokens": _total(tables, keep, "length"),
                "num_supervised": _total(tables, keep, "supervised"),
                "num_renamed": num_renamed,
                **{f"num_{name}": count for name, count in dropped.items()},
            }
        )
        entries["num_samples"] = num_samples
        entries["report"] = report.model_dump(mode="json", exclude={"render_s", "tokenise_s"})
    return report


def find_leaks(train: TokenStore, held_out: TokenStore) -> NDArray[np.int64]:
    """Return the rows of ``train`` whose conversation or tree also stands in ``held_out``.

    Raises:
        ArtifactError: A store has no provenance, since it was not made by `prepare_store`.
    """
    mine, theirs = (_provenance(store.path) for store in (train, held_out))
    return np.flatnonzero(_occurs_in(mine, theirs))


def _read(part: Path) -> tuple[PartSummary, pa.Table]:
    found = read_part(part)
    if found is None:
        raise ArtifactError(f"{part} is damaged; remove it and prepare the store again")
    return found


def _count(
    summaries: Sequence[PartSummary], rejects: Sequence[Reject], config: PrepareConfig
) -> PrepareReport:
    formats: dict[str, Counter[str]] = {}
    for summary in summaries:
        for name, counts in summary.formats.items():
            formats.setdefault(name, Counter()).update(counts)
    reasons = Counter(
        re.sub(r"'[^']*'|0x[0-9a-f]+|[0-9][0-9,]*", "…", reject.reason)[:160] for reject in rejects
    )
    return PrepareReport(
        num_files=len(formats.keys() | {reject.file for reject in rejects}),
        num_rows=sum(summary.num_rows for summary in summaries),
        num_samples=0,
        num_tokens=0,
        num_supervised=0,
        formats={name: dict(counts) for name, counts in formats.items()},
        num_rejects=len(rejects),
        num_rejected_rows=len({(reject.file, reject.line) for reject in rejects}),
        reject_reasons=dict(reasons.most_common()),
        num_duplicates=0,
        num_leaks=0,
        num_other_side=0,
        num_renamed=0,
        max_length=config.max_length,
        num_truncated=sum(summary.num_truncated for summary in summaries),
        truncated_tokens=sum(summary.truncated_tokens for summary in summaries),
        truncated_supervised=sum(summary.truncated_supervised for summary in summaries),
        render_s=sum(summary.render_s for summary in summaries),
        tokenise_s=sum(summary.tokenise_s for summary in summaries),
    )


def _choose(
    tables: Sequence[pa.Table], selection: Selection
) -> tuple[NDArray[np.bool_], dict[str, int]]:
    """Return which samples stay, and how many went for which reason, in that order."""
    hashes = _hashes(tables)
    keep = _first_of_each(hashes)
    dropped = {"duplicates": int(np.count_nonzero(~keep)), "leaks": 0, "other_side": 0}
    if selection.held_out_store is not None:
        theirs = _provenance(selection.held_out_store)
        leaks = [_occurs_in(table.select(PROVENANCE.names), theirs) for table in tables]
        leak = keep & np.concatenate([*leaks, np.empty(0, bool)])
        dropped["leaks"] = int(np.count_nonzero(leak))
        keep &= ~leak
    before = np.count_nonzero(keep)
    if selection.side != "all":
        held = [_is_held_out(table, selection.held_out_percent) for table in tables]
        held_out = np.concatenate([*held, np.empty(0, bool)])
        keep &= held_out if selection.side == "held_out" else ~held_out
    if selection.max_samples is not None and np.count_nonzero(keep) > selection.max_samples:
        rows = np.flatnonzero(keep)
        ranked = rows[np.argsort(hashes[rows], kind="stable")]
        keep = np.zeros_like(keep)
        keep[ranked[: selection.max_samples]] = True
    dropped["other_side"] = int(before - np.count_nonzero(keep))
    return keep, dropped


def _hashes(tables: Sequence[pa.Table]) -> NDArray[np.bytes_]:
    """Return content hashes, bytes of 16, shape ``(num_samples,)``."""
    hashes = [
        np.frombuffer(chunk.buffers()[1], dtype="V16")[chunk.offset : chunk.offset + len(chunk)]
        for table in tables
        for chunk in table.column("content_hash").chunks
    ]
    # Compared as bytes; a trailing zero byte would be lost in numpy's S16, so all are hex.
    joined = np.concatenate([*hashes, np.empty(0, "V16")])
    return np.frombuffer(joined.tobytes().hex().encode(), dtype="S32")


def _first_of_each(values: NDArray[np.bytes_]) -> NDArray[np.bool_]:
    first = np.zeros(len(values), dtype=np.bool_)
    first[np.unique(values, return_index=True)[1]] = True
    return first


def _is_held_out(table: pa.Table, percent: float) -> NDArray[np.bool_]:
    groups = table.column("group").to_pylist()
    draws = [int.from_bytes(hashlib.sha256(group.encode()).digest()[:4], "big") for group in groups]
    return np.array(draws, dtype=np.float64) < percent / 100 * 2**32


def _occurs_in(mine: pa.Table, theirs: pa.Table) -> NDArray[np.bool_]:
    leak = np.zeros(mine.num_rows, dtype=np.bool_)
    for name in ("content_hash", "group"):
        known = set(theirs.column(name).to_pylist())
        leak |= np.array([value in known for value in mine.column(name).to_pylist()], dtype=bool)
    return leak


def _provenance(store: Path) -> pa.Table:
    file = store / PROVENANCE_NAME
    if not file.is_file():
        raise ArtifactError(
            f"{store} has no {PROVENANCE_NAME}, so leaks cannot be found; prepare it again"
        )
    return pa.ipc.open_file(pa.memory_map(str(file))).read_all()


def _unique_ids(tables: Sequence[pa.Table], keep: NDArray[np.bool_]) -> tuple[list[list[str]], int]:
    """Return the ids of each table's kept samples; a second 'x' becomes 'x#2'."""
    seen: Counter[str] = Counter()
    renamed, ids, start = 0, [], 0
    for table in tables:
        own = []
        flags = keep[start : start + table.num_rows]
        for name, kept in zip(table.column("sample_id").to_pylist(), flags, strict=True):
            if kept:
                seen[name] += 1
                renamed += seen[name] > 1
                own.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
        ids.append(own)
        start += table.num_rows
    return ids, renamed


def _write_tables(
    folder: Path, tables: Sequence[pa.Table], keep: NDArray[np.bool_], ids: Sequence[list[str]]
) -> None:
    start = 0
    with (
        ShardWriter(folder) as shards,
        pa.ipc.new_file(folder / PROVENANCE_NAME, PROVENANCE) as provenance,
    ):
        for table, own in zip(tables, ids, strict=True):
            kept = table.filter(pa.array(keep[start : start + table.num_rows]))
            start += table.num_rows
            column = kept.schema.get_field_index("sample_id")
            kept = kept.set_column(column, "sample_id", pa.array(own, pa.string()))
            for batch in kept.select(SCHEMA.names).combine_chunks().to_batches():
                shards.write(pa.record_batch(batch.columns, schema=SCHEMA))
            for batch in kept.select(PROVENANCE.names).combine_chunks().to_batches():
                provenance.write_batch(pa.record_batch(batch.columns, schema=PROVENANCE))


def _total(tables: Sequence[pa.Table], keep: NDArray[np.bool_], name: str) -> int:
    values = [table.column(name).to_numpy() for table in tables]
    joined = np.concatenate([*values, np.empty(0, np.int32)])
    return int(joined[keep].sum(dtype=np.int64))
