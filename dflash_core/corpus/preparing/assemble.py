"""Parts to a store: duplicates and leaks left out, ids made unique, everything counted.

Parts are opened one at a time, twice: first for what decides about each sample, then to be copied.
Between the two a sample costs 29 bytes of memory.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field

from dflash_core.artifacts import atomic_write, new_artifact
from dflash_core.config import FrozenModel, changed
from dflash_core.corpus.config import ROW_FIELDS, PrepareConfig
from dflash_core.corpus.preparing.part import PROVENANCE, PartSummary, Reject, read_part, to_lines
from dflash_core.corpus.store import SCHEMA, STORE_KIND, STORE_VERSION, ShardWriter, TokenStore
from dflash_core.errors import ArtifactError, DataError

__all__ = ["PrepareReport", "Selection", "assemble", "check_rejects", "find_leaks"]

PROVENANCE_NAME = "provenance.arrow"
REJECTS_NAME = "rejects.jsonl"
KEYS = ("content_hash", "group")


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
    summaries, keys = _first_look(parts, selection)
    rejects = [reject for summary in summaries for reject in summary.rejects]
    report = _count(summaries, rejects, config)
    beside = out.with_name(f"{out.name}.{REJECTS_NAME}")
    check_rejects(rejects, report.num_rows, config.max_reject_share, beside)
    keep, dropped = _choose(keys, selection)
    num_samples = int(np.count_nonzero(keep))
    if num_samples == 0:
        atomic_write(beside, to_lines(rejects))
        raise DataError(
            f"no sample is left for {out} of {report.num_rows:,} rows: {report.num_rejects:,} were "
            f"refused (see {beside}), {dropped['duplicates']:,} were duplicates; check the inputs "
            "and the selection"
        )
    names = _Names(keys.names[keep])
    entries = {**facts, "config": config.model_dump(mode="json", include=ROW_FIELDS)}
    with new_artifact(
        out, kind=STORE_KIND, format_version=STORE_VERSION, metadata=entries
    ) as folder:
        num_tokens, num_supervised = _copy(parts, folder, keep, names)
        (folder / REJECTS_NAME).write_text(to_lines(rejects), encoding="utf-8")
        counts = {
            "num_samples": num_samples,
            "num_tokens": num_tokens,
            "num_supervised": num_supervised,
            "num_renamed": names.num_renamed,
            **{f"num_{name}": count for name, count in dropped.items()},
        }
        report = changed(report, counts)
        entries["num_samples"] = num_samples
        entries["report"] = report.model_dump(mode="json", exclude={"render_s", "tokenise_s"})
    return report


def check_rejects(
    rejects: Sequence[Reject], num_rows: int, max_reject_share: float, beside: Path | None = None
) -> None:
    """Refuse to go on with inputs of which too much would be lost.

    Args:
        rejects: Rows refused.
        num_rows: All rows.
        max_reject_share: Most of them that may be refused.
        beside: Where the refused rows are written, if there are too many.

    Raises:
        DataError: There are too many.
    """
    share = _num_rejected_rows(rejects) / max(num_rows, 1)
    if beside is not None:
        beside.unlink(missing_ok=True)
    if share > max_reject_share:
        ((kind, count),) = _reasons(rejects).most_common(1)
        example = next(reject for reject in rejects if _kind(reject) == kind)
        if beside is not None:
            atomic_write(beside, to_lines(rejects))
        raise DataError(
            f"{_num_rejected_rows(rejects):,} of {num_rows:,} rows were refused ({share:.1%}), "
            f"more than max_reject_share {max_reject_share}"
            f"{'' if beside is None else f' (all in {beside})'}; the commonest of the reasons "
            f"({count:,} rows) is that {example}"
        )


def find_leaks(train: TokenStore, held_out: TokenStore) -> NDArray[np.int64]:
    """Return the rows of ``train`` whose conversation or tree also stands in ``held_out``.

    Raises:
        ArtifactError: A store has no provenance, since it was not made by `prepare_store`.
    """
    return np.flatnonzero(_Known(held_out.path).has(_provenance(train.path)))


@dataclass(frozen=True)
class _Keys:
    """What decides about the samples of all parts, in their order, each ``(num_samples,)``.

    Attributes:
        hashes: Content hashes as two big-endian halves, uint64, shape ``(num_samples, 2)``.
        names: Hashes of the sample ids, uint64.
        draws: Hashes of the groups, uint32: the smallest are held out.
        known: Whether the held-out store knows the conversation or its tree.
    """

    hashes: NDArray[np.uint64]
    names: NDArray[np.uint64]
    draws: NDArray[np.uint32]
    known: NDArray[np.bool_]


class _Known:
    """What a held-out store holds."""

    def __init__(self, store: Path) -> None:
        table = _provenance(store)
        self._values = {n: pa.array(set(table[n].to_pylist()), table[n].type) for n in KEYS}

    def has(self, table: pa.Table) -> NDArray[np.bool_]:
        """Say which rows' content or tree it holds, shape ``(num_rows,)``."""
        found = np.zeros(table.num_rows, dtype=np.bool_)
        for name, values in self._values.items():
            known = pc.call_function("is_in", [table[name]], pc.SetLookupOptions(values))
            found |= known.to_numpy()
        return found


class _Names:
    """Makes ids unique: a second 'x' becomes 'x#2'.

    Args:
        hashes: Hashes of all ids that will be asked for.
    """

    def __init__(self, hashes: NDArray[np.uint64]) -> None:
        ordered = np.sort(hashes)
        self._ordered = ordered
        # Only ids that may have a twin are remembered.
        self._repeated = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
        self._seen: Counter[str] = Counter()
        self.num_renamed = 0

    def unique(self, ids: pa.ChunkedArray) -> pa.Array:
        """Return the ids of the next samples."""
        names = [
            self._number(name) if value in self._repeated else name
            for name, value in zip(ids.to_pylist(), _hashed(ids).tolist(), strict=True)
        ]
        return pa.array(names, pa.string())

    def _number(self, name: str) -> str:
        self._seen[name] += 1
        if self._seen[name] == 1:
            return name
        self.num_renamed += 1
        while self._is_taken(numbered := f"{name}#{self._seen[name]}"):
            self._seen[name] += 1
        return numbered

    def _is_taken(self, name: str) -> bool:
        (value,) = _hashed(pa.chunked_array([[name]]))
        place = np.searchsorted(self._ordered, value)
        return bool(place < len(self._ordered) and self._ordered[place] == value)


def _first_look(parts: Sequence[Path], selection: Selection) -> tuple[list[PartSummary], _Keys]:
    known = None if selection.held_out_store is None else _Known(selection.held_out_store)
    summaries: list[PartSummary] = []
    keys: list[_Keys] = []
    for part in parts:
        summary, table = _read(part)
        summaries.append(summary)
        # Copied, so that nothing keeps the part open.
        content = b"".join(table["content_hash"].to_pylist())
        keys.append(
            _Keys(
                np.frombuffer(content, dtype=">u8").astype(np.uint64).reshape(-1, 2),
                _hashed(table["sample_id"]),
                _draws(table["group"].to_pylist()),
                np.zeros(table.num_rows, np.bool_) if known is None else known.has(table),
            )
        )
    columns = (np.concatenate([getattr(own, f.name) for own in keys]) for f in fields(_Keys))
    return summaries, _Keys(*columns)


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
    return PrepareReport(
        num_files=len(formats.keys() | {reject.file for reject in rejects}),
        num_rows=sum(summary.num_rows for summary in summaries),
        num_samples=0,
        num_tokens=0,
        num_supervised=0,
        formats={name: dict(counts) for name, counts in formats.items()},
        num_rejects=len(rejects),
        num_rejected_rows=_num_rejected_rows(rejects),
        reject_reasons=dict(_reasons(rejects).most_common()),
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


def _num_rejected_rows(rejects: Sequence[Reject]) -> int:
    return len({(reject.file, reject.line) for reject in rejects})


def _reasons(rejects: Sequence[Reject]) -> Counter[str]:
    return Counter(map(_kind, rejects))


def _kind(reject: Reject) -> str:
    """Return a reason without its numbers and names."""
    return re.sub(r"'[^']*'|0x[0-9a-f]+|(?<![0-9])(?<!UTF-)[0-9][0-9,]*", "…", reject.reason)[:160]


def _choose(keys: _Keys, selection: Selection) -> tuple[NDArray[np.bool_], dict[str, int]]:
    """Return which samples stay, and how many went for which reason, in that order."""
    keep = _first_of_each(keys.hashes)
    dropped = {"duplicates": int(np.count_nonzero(~keep))}
    dropped["leaks"] = int(np.count_nonzero(keep & keys.known))
    keep &= ~keys.known
    before = np.count_nonzero(keep)
    if selection.side != "all":
        held_out = keys.draws < selection.held_out_percent / 100 * 2**32
        keep &= held_out if selection.side == "held_out" else ~held_out
    if selection.max_samples is not None and np.count_nonzero(keep) > selection.max_samples:
        rows = np.flatnonzero(keep)
        ranked = rows[_order(keys.hashes[rows])]
        keep = np.zeros_like(keep)
        keep[ranked[: selection.max_samples]] = True
    dropped["other_side"] = int(before - np.count_nonzero(keep))
    return keep, dropped


def _order(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    return np.lexsort((hashes[:, 1], hashes[:, 0]))


def _first_of_each(hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Say which rows are the first with their hash, shape ``(num_samples,)``."""
    order = _order(hashes)  # stable: of equal hashes the first row comes first
    repeats = np.zeros(len(hashes), dtype=np.bool_)
    repeats[order[1:]] = (hashes[order[1:]] == hashes[order[:-1]]).all(axis=1)
    return ~repeats


def _hashed(texts: pa.ChunkedArray) -> NDArray[np.uint64]:
    return pl.Series(texts).hash().to_numpy().copy()


def _draws(groups: Sequence[str]) -> NDArray[np.uint32]:
    digests = (hashlib.sha256(group.encode()).digest()[:4] for group in groups)
    return np.frombuffer(b"".join(digests), dtype=">u4").astype(np.uint32)


def _provenance(store: Path) -> pa.Table:
    file = store / PROVENANCE_NAME
    if not file.is_file():
        raise ArtifactError(
            f"{store} has no {PROVENANCE_NAME}, so leaks cannot be found; prepare it again"
        )
    return pa.ipc.open_file(pa.memory_map(str(file))).read_all()


def _copy(
    parts: Sequence[Path], folder: Path, keep: NDArray[np.bool_], names: _Names
) -> tuple[int, int]:
    """Write the kept samples of all parts; return their tokens and supervised tokens."""
    start = num_tokens = num_supervised = 0
    with (
        ShardWriter(folder) as shards,
        pa.ipc.new_file(folder / PROVENANCE_NAME, PROVENANCE) as provenance,
    ):
        for part in parts:
            _, table = _read(part)
            flags = keep[start : start + table.num_rows]
            start += table.num_rows
            kept = table.filter(pa.array(flags))
            column = kept.schema.get_field_index("sample_id")
            ids = names.unique(kept["sample_id"])
            kept = kept.set_column(column, "sample_id", ids).combine_chunks()
            num_tokens += int(kept["length"].to_numpy().sum(dtype=np.int64))
            num_supervised += int(kept["supervised"].to_numpy().sum(dtype=np.int64))
            for batch in kept.select(SCHEMA.names).to_batches():
                shards.write(pa.record_batch(batch.columns, schema=SCHEMA))
            for batch in kept.select(PROVENANCE.names).to_batches():
                provenance.write_batch(pa.record_batch(batch.columns, schema=PROVENANCE))
    return num_tokens, num_supervised
