"""One part of a preparation: a few hundred rows of chat files, tokenised, in one Arrow file.

A part depends on its rows and the settings alone, never on which worker made it. It is renamed
into place when complete, its summary and refused rows in its own metadata, so that a restart takes
up exactly the parts that are missing.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from dflash_core.artifacts import atomic_write
from dflash_core.config import FrozenModel
from dflash_core.corpus.config import PrepareConfig
from dflash_core.corpus.masking.encoder import ChatEncoder, EncodedChat
from dflash_core.corpus.masking.spans import Rendering
from dflash_core.corpus.reading.chats import Conversation, Format, convert_row, detect_format
from dflash_core.corpus.reading.files import RawRow, parse_row, stem_of
from dflash_core.corpus.store import SCHEMA, Sample, record_batch
from dflash_core.errors import DataError

__all__ = [
    "PART_SCHEMA",
    "PROVENANCE",
    "PartSummary",
    "Reject",
    "Tokeniser",
    "read_part",
    "to_lines",
    "to_reject",
]

PROVENANCE = pa.schema(
    [
        ("content_hash", pa.binary(16)),
        ("group", pa.string()),
        ("file", pa.string()),
        ("line", pa.int64()),
    ]
)
PART_SCHEMA = pa.schema([*SCHEMA, *PROVENANCE])
SUMMARY_KEY = b"summary"


class Reject(FrozenModel):
    """A row that is not in the store, and why."""

    file: str
    """Name of its file, as given."""
    line: int
    """Line or row, counted from 1; 0 for the file as a whole."""
    reason: str
    """Why, in words."""
    sample_id: str = ""
    """Its own id, where it has one."""

    def __str__(self) -> str:
        row = f"row {self.line} of " if self.line else ""
        return f"{row}{self.file} {self.reason}"


class PartSummary(FrozenModel):
    """What became of the rows of one part."""

    num_rows: int
    """Rows read, unreadable ones included."""
    num_samples: int
    """Samples made of them."""
    formats: dict[str, dict[str, int]]
    """Rows by file and the format they were taken for."""
    rejects: list[Reject]
    """Rows refused."""
    num_truncated: int
    """Samples cut at the limit."""
    truncated_tokens: int
    """Tokens cut off."""
    truncated_supervised: int
    """Supervised tokens cut off."""
    render_s: float
    """Seconds spent rendering templates and finding answers."""
    tokenise_s: float
    """Seconds spent in the tokenizer."""


@dataclass
class _Draft:
    """A part in the making."""

    samples: list[Sample] = field(default_factory=list)
    provenance: list[tuple[bytes, str, str, int]] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    formats: Counter[tuple[Path, Format]] = field(default_factory=Counter)
    truncated: list[tuple[int, int]] = field(default_factory=list)


class _Origin(NamedTuple):
    file: Path
    line: int
    conversation: Conversation
    digest: str


class Tokeniser:
    """Makes parts out of rows."""

    def __init__(self, encoder: ChatEncoder, config: PrepareConfig) -> None:
        self.encoder = encoder
        self.config = config
        self._vocab_size = encoder.vocab_size

    def write_part(self, path: Path, rows: Sequence[tuple[Path, RawRow]]) -> PartSummary:
        """Tokenise rows and write them as one part."""
        draft = _Draft()
        started = time.perf_counter()
        rendered = list(self._render(rows, draft))
        tokenising = time.perf_counter()
        encoded = self._encode([rendering for _, rendering in rendered])
        ended = time.perf_counter()
        for (origin, _), chat in zip(rendered, encoded, strict=True):
            self._keep(origin, chat, draft)
        summary = PartSummary(
            num_rows=len(rows),
            num_samples=len(draft.samples),
            formats=_by_file(draft.formats),
            rejects=draft.rejects,
            num_truncated=len(draft.truncated),
            truncated_tokens=sum(tokens for tokens, _ in draft.truncated),
            truncated_supervised=sum(supervised for _, supervised in draft.truncated),
            render_s=tokenising - started,
            tokenise_s=ended - tokenising,
        )
        _write(path, draft, summary)
        return summary

    def _render(
        self, rows: Sequence[tuple[Path, RawRow]], draft: _Draft
    ) -> Iterator[tuple[_Origin, Rendering | EncodedChat]]:
        for file, raw in rows:
            row = parse_row(raw)
            try:
                if row.error is not None:
                    raise DataError(row.error)
                form = self._format(row.data)
                conversations = convert_row(row.data, form, self.config.columns)
                digests = [conversation.content_hash for conversation in conversations]
            except (DataError, RecursionError) as error:
                draft.rejects.append(to_reject(file, row.number, error, _own_id(row.data)))
                continue
            draft.formats[file, form] += 1
            for conversation, digest in zip(conversations, digests, strict=True):
                try:
                    rendered = self._render_one(conversation)
                except DataError as error:
                    draft.rejects.append(to_reject(file, row.number, error, conversation.row_id))
                else:
                    yield _Origin(file, row.number, conversation, digest), rendered

    def _format(self, data: Any) -> Format:
        given = self.config.format
        return detect_format(data, self.config.columns) if given == "auto" else given

    def _render_one(self, conversation: Conversation) -> Rendering | EncodedChat:
        if conversation.input_ids is not None and conversation.loss_mask is not None:
            return self._check_ids(conversation.input_ids, conversation.loss_mask)
        if conversation.text is not None:
            return self.encoder.encode_text(conversation.text)
        messages = conversation.messages
        if not any(message["role"] == "assistant" for message in messages):
            raise DataError("has no assistant turn to supervise")
        return self.encoder.render(messages, tools=conversation.tools or None)

    def _check_ids(self, ids: tuple[int, ...], mask: tuple[int, ...]) -> EncodedChat:
        low, high = (min(ids), max(ids)) if ids else (0, 0)
        if low < 0 or high >= self._vocab_size:
            raise DataError(
                f"has the token id {low if low < 0 else high}, outside the tokenizer's "
                f"{self._vocab_size:,} ids"
            )
        return EncodedChat(np.array(ids, dtype=np.int32), np.array(mask, dtype=np.bool_))

    def _encode(self, rendered: Sequence[Rendering | EncodedChat]) -> list[EncodedChat]:
        chats = [item for item in rendered if isinstance(item, Rendering)]
        encoded = iter(self.encoder.encode_rendered(chats, supervise=self.config.supervise))
        return [item if isinstance(item, EncodedChat) else next(encoded) for item in rendered]

    def _keep(self, origin: _Origin, chat: EncodedChat, draft: _Draft) -> None:
        """Cut a sample at the limit and keep it, or refuse it."""
        limit = self.config.max_length
        conversation = origin.conversation
        ids, mask = chat.input_ids[:limit], chat.loss_mask[:limit]
        over = len(chat.input_ids) - len(ids)
        reason = None
        if over and self.config.oversize == "drop":
            reason = (
                f"has {len(chat.input_ids):,} tokens, more than max_length {limit:,}, and oversize "
                "is 'drop'"
            )
        elif not mask.any():
            lost = int(np.count_nonzero(chat.loss_mask))
            reason = (
                f"has no supervised token within max_length {limit:,}, {lost:,} behind it"
                if lost
                else "has no supervised token"
            )
        if reason is not None:
            error = DataError(reason)
            draft.rejects.append(to_reject(origin.file, origin.line, error, conversation.row_id))
            return
        if over:
            supervised = int(np.count_nonzero(chat.loss_mask[limit:]))
            draft.truncated.append((over, supervised))
        stem = _printable(stem_of(origin.file))
        name = _printable(conversation.row_id) or str(origin.line)
        domain = _printable(conversation.domain) or stem
        draft.samples.append(Sample(ids, mask, domain, f"{stem}/{name}"))
        draft.provenance.append(
            (
                bytes.fromhex(origin.digest[:32]),
                _printable(conversation.group) or origin.digest[:32],
                _printable(str(origin.file)),
                origin.line,
            )
        )


def read_part(path: Path) -> tuple[PartSummary, pa.Table] | None:
    """Map a finished part; None when the file is none."""
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        metadata = table.schema.metadata or {}
        return PartSummary.model_validate_json(metadata[SUMMARY_KEY]), table
    except (OSError, pa.ArrowException, KeyError, ValueError):
        return None


def _by_file(counts: Mapping[tuple[Path, Format], int]) -> dict[str, dict[str, int]]:
    formats: dict[str, dict[str, int]] = {}
    for (file, form), count in counts.items():
        formats.setdefault(_printable(str(file)), {})[form] = count
    return formats


def _write(path: Path, draft: _Draft, summary: PartSummary) -> None:
    columns = [
        pa.array([row[k] for row in draft.provenance], kind.type)
        for k, kind in enumerate(PROVENANCE)
    ]
    schema = PART_SCHEMA.with_metadata({SUMMARY_KEY: summary.model_dump_json().encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        if draft.samples:
            batch = record_batch(draft.samples)
            writer.write_batch(pa.record_batch([*batch.columns, *columns], schema=schema))
    atomic_write(path, sink.getvalue().to_pybytes())


def to_reject(file: Path, line: int, error: Exception, sample_id: str = "") -> Reject:
    """Return an error of one row as its reject, all of it printable."""
    return Reject(
        file=_printable(str(file)),
        line=line,
        reason=_printable(
            "is nested too deeply" if isinstance(error, RecursionError) else str(error)
        ),
        sample_id=_printable(sample_id),
    )


def to_lines(rejects: Sequence[Reject]) -> str:
    """Return the text of a file of rejects."""
    return "".join(reject.model_dump_json() + "\n" for reject in rejects)


def _printable(text: str) -> str:
    """Return text with lone surrogates spelled out, which no file format takes."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _own_id(data: Any) -> str:
    if isinstance(data, dict):
        for name in ("id", "uid", "conversation_id", "sample_id"):
            if isinstance(data.get(name), str | int):
                return str(data[name])
    return ""
