"""What stands under which key of a row: names of the same thing, and what is refused by name."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_core.errors import DataError

__all__ = [
    "chat_of",
    "chat_under",
    "check_keys",
    "check_wanted",
    "first_of",
    "kind_of",
    "looks_like_chat",
    "maybe_json",
    "only",
    "opened",
    "text_under",
    "told_keys",
    "unknown_chats",
]

CHATS = ("messages", "conversations", "conversation", "dialog", "chat")
LISTS = (*CHATS, "history", "question")
TURNS = (*LISTS, "turns")
SYSTEMS = ("system", "system_prompt")
QUESTIONS = ("instruction", "question", "prompt", "query", "problem")
INPUTS = ("input", "context")
# Of a preference: the answer to learn from, which may stand beside a whole chat.
PREFERRED = ("chosen", "chosen_response", "preferred_output")
ANSWERS = (
    *("output", "response", "answer", "completion", "canonical_solution", "solution"),
    *PREFERRED,
)
TOOLS = ("tools", "functions", "tool_defs")
IDS = (
    *("sample_id", "id", "uid", "conversation_id", "task_id", "question_id", "message_tree_id"),
    "custom_id",
)
# A turn as one object: who asks, who answers.
ASKED = ("user", "human", *QUESTIONS, "input")
ANSWERED = ("bot", "assistant", "gpt", *ANSWERS)
# Objects that hold the row itself: OpenAI's batches and preferences.
ENVELOPES = ("body", "input")

# What no reader here takes, by key, in rows and in messages: it would be lost in silence.
MEDIA = {
    name: f"has something under '{name}', which is not read; give rows of text alone"
    for kind in ("image", "video", "audio")
    for name in (kind, f"{kind}s", f"{kind}_url", f"{kind}_path")
}
UNREAD = {
    **MEDIA,
    "train_detail": "has 'train_detail', parts of an answer to learn from; flag whole answers",
}
UNREAD_IN_ROWS = {
    **UNREAD,
    "documents": "has 'documents', which its prompt would lack; write them into the messages",
    **{
        name: f"has its own {name}; remove it and set corpus.template_variables"
        for name in ("chat_template_kwargs", "enable_thinking")
    },
}
# Unpaired preferences (KTO) by their names in TRL, ms-swift and LLaMA-Factory.
LABELS = ("label", "kto_tag")
SYNONYMS = (LISTS, SYSTEMS, QUESTIONS, INPUTS, ANSWERS, TOOLS, IDS)
HUMAN = re.compile(r"(?:^|\n\n)(Human|Assistant):[ ]?")


def kind_of(value: Any) -> str:
    """Return the name of a value's type, for messages about it."""
    return type(value).__name__


def first_of(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the value under the first name that has one; None when none has."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def maybe_json(value: Any) -> Any:
    """Return what a string holds as JSON, or the value itself."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def only(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return what stands under one of several names for the same thing.

    Raises:
        DataError: They say different things.
    """
    filled = [name for name in names if row.get(name)]
    if len(filled) > 1 and any(row[name] != row[filled[0]] for name in filled):
        raise DataError(f"says different things under {' and '.join(filled)}; keep one of them")
    return row[filled[0]] if filled else first_of(row, names)


def text_under(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the text under one of the names; empty when there is none.

    Raises:
        DataError: It is no text.
    """
    value = only(row, names)
    if value is not None and not isinstance(value, str):
        raise DataError(f"has a {names[0]} of type {kind_of(value)}, not text")
    return value or ""


def chat_of(value: Any) -> list[Any] | None:
    """Return the list of turns that a value is: as it is, in JSON, or as one text (hh-rlhf)."""
    if isinstance(value, str) and value.lstrip("\n").startswith("Human:"):
        _, *told = HUMAN.split("\n\n" + value.lstrip("\n"))
        said = zip(told[::2], told[1::2], strict=True)
        turns = [{"role": role, "content": text.strip()} for role, text in said]
        return turns if turns[-1]["content"] else turns[:-1]
    parsed = maybe_json(value)
    columns = list(parsed.values()) if isinstance(parsed, dict) else [None]
    lengths = {len(column) if isinstance(column, list) else None for column in columns}
    if isinstance(parsed, dict) and len(lengths) == 1 and None not in lengths:
        # An object of lists, as the datasets library keeps a list of objects.
        return [dict(zip(parsed, turn, strict=True)) for turn in zip(*columns, strict=True)]
    return parsed if isinstance(parsed, list) else None


def chat_under(row: Mapping[str, Any], names: Sequence[str]) -> list[Any] | None:
    """Return the list of turns under one of the names; None when there is none.

    Raises:
        DataError: Lists under several of them differ.
    """
    # A question may look like JSON.
    found = {n: row.get(n) if n == "question" else chat_of(row.get(n)) for n in names}
    lists = {name: value for name, value in found.items() if isinstance(value, list)}
    return only(lists, names) if lists else None


def opened(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return a row out of its envelope, its keys named as ``columns`` tells.

    Args:
        row: The row.
        columns: Which key of the rows is what, such as ``{"messages": "traj"}``.

    Raises:
        DataError: It lacks a key of ``columns``.
    """
    for name, key in columns.items():
        if key not in row:
            raise DataError(
                f"has no key '{key}', which corpus.columns names for '{name}'; {told_keys(row)}"
            )
    told = {n for names in SYNONYMS if columns.keys() & set(names) for n in names}
    named = {k: v for k, v in row.items() if k not in told and k not in columns.values()}
    named |= {name: row[key] for name, key in columns.items()}
    for name in ENVELOPES:
        inner = named.get(name)
        if isinstance(inner, dict) and "messages" in inner:
            return {**{key: value for key, value in named.items() if key != name}, **inner}
    return named


def check_keys(row: Mapping[str, Any], unread: Mapping[str, str]) -> None:
    """Refuse what says something that would be left out.

    Raises:
        DataError: It does.
    """
    for name, why in unread.items():
        if _says_something(row.get(name)):
            raise DataError(why)


def _says_something(value: Any) -> bool:
    """Say whether a value is more than nulls and empty texts, however deep they stand."""
    if isinstance(value, dict | list):
        return any(map(_says_something, value.values() if isinstance(value, dict) else value))
    return value not in (None, "")


def check_wanted(row: Mapping[str, Any]) -> None:
    """Refuse a row whose answer is an example of what not to say.

    Raises:
        DataError: It is one.
    """
    for name in LABELS:
        if row.get(name) is False or str(row.get(name)).lower() == "false":
            raise DataError(
                f"holds an answer that is not wanted ('{name}' is false); leave such rows out or "
                "raise corpus.max_reject_share above their share"
            )


def unknown_chats(row: Mapping[str, Any]) -> list[str]:
    """Return the keys under which stands a chat, but that are none of those known."""
    others = row.keys() - {"rejected", *TURNS, *QUESTIONS, *ANSWERS}
    return [key for key in row if key in others and looks_like_chat(chat_of(row[key]))]


def told_keys(row: Mapping[str, Any]) -> str:
    """Name a row's keys, and which of them looks like a chat."""
    listed = f"its keys are {', '.join(map(str, row))[:200]}"
    alike = unknown_chats(row)
    if not alike:
        return listed
    return (
        f"{listed}; '{alike[0]}' looks like a chat: set corpus.columns to "
        f'{{messages = "{alike[0]}"}}'
    )


def looks_like_chat(turns: Any) -> bool:
    """Say whether a value is a list of messages."""
    return (
        isinstance(turns, list)
        and bool(turns)
        and all(isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in turns)
    )
