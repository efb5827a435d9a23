"""Conversations of chat files, in order, and a count of the rows that give none."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from dflash_core.corpus.config import PrepareConfig
from dflash_core.corpus.preparing.part import Reject, to_reject
from dflash_core.corpus.reading.chats import Conversation, convert_row
from dflash_core.corpus.reading.files import RawRow, find_files, iter_rows, parse_row, stem_of
from dflash_core.errors import DataError

__all__ = ["Intake", "iter_conversations", "iter_made"]

T = TypeVar("T")


@dataclass
class Intake:
    """What became of the rows that `iter_conversations` has read so far.

    Attributes:
        num_rows: Rows read, unreadable ones included.
        num_conversations: Conversations they gave.
        rejects: Rows that cannot be taken.
        no_chats: Rows of text or tokens, which hold nothing to answer.
    """

    num_rows: int = 0
    num_conversations: int = 0
    rejects: list[Reject] = field(default_factory=list)
    no_chats: list[str] = field(default_factory=list)

    @property
    def passed_over(self) -> list[str]:
        """Which rows gave no conversation, and why."""
        return [*map(str, self.rejects), *self.no_chats]


def iter_conversations(
    inputs: Sequence[Path], config: PrepareConfig, *, intake: Intake | None = None
) -> Iterator[Conversation]:
    """Yield the chats of files in order, prompts without answers included.

    Rows that cannot be taken, text and token rows are passed over.

    Args:
        inputs: Files, or folders of files.
        config: Format of the rows.
        intake: Told of each row as it is read.
    """
    return iter_made(inputs, config, lambda item: item, intake=intake)


def iter_made(
    inputs: Sequence[Path],
    config: PrepareConfig,
    make: Callable[[Conversation], T],
    *,
    intake: Intake | None = None,
) -> Iterator[T]:
    """Yield what is made of each conversation of `iter_conversations`.

    Args:
        inputs: Files, or folders of files.
        config: Format of the rows.
        make: Raises `DataError` where a conversation cannot be taken; its row is passed over then.
        intake: Told of each row as it is read.
    """
    intake = Intake() if intake is None else intake
    form = None if config.format == "auto" else config.format
    for file, raw in _rows(inputs):
        intake.num_rows += 1
        row = parse_row(raw)
        try:
            if row.error is not None:
                raise DataError(row.error)
            found = convert_row(row.data, form, config.columns)
        except DataError as error:
            intake.rejects.append(to_reject(file, row.number, error))
            continue
        for k, item in enumerate(found):
            if not item.messages:
                intake.no_chats.append(f"row {row.number} of {file} is no chat but text or tokens")
                continue
            number = f"{row.number}.{k}" if len(found) > 1 else str(row.number)
            try:
                made = make(_named(item, stem_of(file), number))
            except DataError as error:
                intake.rejects.append(to_reject(file, row.number, error))
                continue
            intake.num_conversations += 1
            yield made


def _rows(inputs: Sequence[Path]) -> Iterator[tuple[Path, RawRow]]:
    files, unreadable = find_files(inputs)
    for file, why in unreadable:
        yield file, RawRow(0, error=f"cannot be read: {why}")
    for file in files:
        for row in iter_rows(file):
            yield file, row


def _named(item: Conversation, stem: str, number: str) -> Conversation:
    return Conversation(
        messages=item.messages,
        tools=item.tools,
        row_id=f"{stem}/{item.row_id or number}",
        group=item.group,
        domain=item.domain or stem,
    )
