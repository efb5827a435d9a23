"""Messages, however a chat file spells them, as OpenAI's."""

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from dflash_core.corpus.masking.tools import to_calls
from dflash_core.corpus.preparing.keys import TOOLS, UNREAD, check_keys, first_of, kind_of
from dflash_core.errors import DataError

__all__ = ["thought_of", "to_message", "to_messages"]

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "function_call",
    "tool_call": "function_call",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "ipython": "tool",
}
CONTENTS = ("content", "value", "text")
REASONING = ("reasoning_content", "reasoning", "thinking")
CONTENT_KEYS = ("text", "value", "answer", "content")
# Whether a turn is learnt from: OpenAI, ms-swift, LLaMA-Factory, and axolotl's two.
LEARNT = ("weight", "loss", "loss_weight", "loss_scale", "train", "training")
# What the parts of a content become, by their type.
PARTS = {
    "text": "content",
    "input_text": "content",
    "output_text": "content",
    "reasoning": "reasoning_content",
    "thinking": "reasoning_content",
    "tool_call": "tool_calls",
}
UNREAD_IN_MESSAGES = {
    **UNREAD,
    **{name: f"has its own {name}; give them to the row" for name in TOOLS},
    "function_calls": "has 'function_calls', which are not read; give 'tool_calls'",
}


def to_messages(values: Sequence[Any]) -> list[dict[str, Any]]:
    """Return a list of messages; those of nothing but calls belong to the turn before them.

    Raises:
        DataError: It is empty, or one of them is no message.
    """
    if all(isinstance(value, list) for value in values):
        values = list(chain.from_iterable(values))
    if not values:
        raise DataError("has an empty list of messages")
    messages: list[dict[str, Any]] = []
    for number, value in enumerate(values):
        message = to_message(value, number)
        last: Mapping[str, Any] = messages[-1] if messages else {"role": None}
        if _role(value) == "function_call" and last["role"] == "assistant":
            if last.get("weight") != message.get("weight"):
                raise DataError(f"message {number} calls tools in a turn learnt from in part")
            calls = [*last.get("tool_calls", ()), *message["tool_calls"]]
            messages[-1] = {**last, "tool_calls": calls}
        else:
            messages.append(message)
    return messages


def to_message(value: Any, number: int) -> dict[str, Any]:
    """Return an OpenAI message with a text content.

    An answer that is not to be learnt from has ``weight`` 0.

    Raises:
        DataError: It is none, or a part of it cannot be taken; the message names ``number``.
    """
    try:
        return _message(value)
    except DataError as error:
        raise DataError(f"message {number} {error}") from None


def thought_of(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the thought that stands beside an answer, as a part of its message.

    Raises:
        DataError: It is no text.
    """
    thought = first_of(row, REASONING)
    if thought is not None and not isinstance(thought, str):
        raise DataError(f"has a thought of type {kind_of(thought)}, not text")
    return {"reasoning_content": thought} if thought else {}


def _message(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"is a {kind_of(value)}, not an object")
    role = _role(value)
    if role is None:
        raise DataError(f"has the unknown role {first_of(value, ('role', 'from'))!r}")
    check_keys(value, UNREAD_IN_MESSAGES)
    content = first_of(value, CONTENTS)
    message = {"role": role, **_said(role, content)}
    calls = [
        *message.pop("tool_calls", ()),
        *to_calls(value.get("tool_calls")),
        *to_calls(value.get("function_call")),
    ]
    if not calls and (content is None or role == "function_call"):
        raise DataError(f"of role '{role}' has no content")
    if calls:
        message |= {"role": "assistant", "tool_calls": calls}
    if message["role"] == "assistant":
        message |= thought_of(value)
    learnt = _learnt(value)
    if learnt and message["role"] != "assistant":
        raise DataError(f"of role '{role}' is to be learnt from, which only answers are")
    if learnt is False:
        message["weight"] = 0
    if message["role"] != "assistant":
        message.pop("weight", None)
    return message | ({"cut_off": True} if value.get("cut_off") is True else {})


def _role(value: Any) -> str | None:
    name = first_of(value, ("role", "from")) if isinstance(value, dict) else None
    return ROLES.get(name.lower()) if isinstance(name, str) else None


def _learnt(value: Mapping[str, Any]) -> bool | None:
    """Return whether a turn, or a part of one, is learnt from; None where it does not say."""
    given = {name: value[name] for name in LEARNT if value.get(name) is not None}
    for name, flag in given.items():
        if not isinstance(flag, bool | int | float) or flag not in (0, 1):
            raise DataError(f"has the {name} {flag!r}, which is neither 0 nor 1")
    if len(set(given.values())) > 1:
        raise DataError(f"says different things under {' and '.join(given)}; keep one of them")
    return next(map(bool, given.values()), None)


def _said(role: str, content: Any) -> dict[str, Any]:
    """Return content, reasoning and tool calls of whatever a message holds."""
    if content is None or (isinstance(content, str) and role != "function_call"):
        return {"content": content or ""}
    if role == "function_call":
        return {"content": "", "tool_calls": to_calls(content)}
    if isinstance(content, list) and (role != "tool" or all(map(_is_text, content))):
        return _said_in_parts(content)
    if role == "tool":  # a result is whatever the tool gave
        return {"content": json.dumps(content, ensure_ascii=False)}
    if not isinstance(content, dict):
        raise DataError(f"has a content of type {kind_of(content)}")
    filled = [key for key in content if content[key] is not None]
    if len(filled) != 1 or filled[0] not in CONTENT_KEYS or not _is_text(content[filled[0]]):
        raise DataError(
            f"has a content object of keys {', '.join(map(str, content))}, not one text under "
            f"{', '.join(CONTENT_KEYS)}"
        )
    return {"content": content[filled[0]]}


def _is_text(part: Any) -> bool:
    return isinstance(part, str) or (
        isinstance(part, dict) and PARTS.get(str(part.get("type"))) == "content"
    )


def _said_in_parts(parts: Sequence[Any]) -> dict[str, Any]:
    said: dict[str, list[Any]] = {"content": [], "reasoning_content": [], "tool_calls": []}
    learnt = set()
    for given in parts:
        part = {"type": "text", "text": given} if isinstance(given, str) else given
        if not isinstance(part, dict):
            raise DataError(f"has a content part of type {kind_of(part)}")
        kind = str(part.get("type", "text"))
        name = PARTS.get(kind, "")
        value = first_of(part, ("text", "value", "content", kind))
        if name == "tool_calls":
            said[name] += to_calls(part if value is None else value)
        elif name and isinstance(value, str):
            said[name].append(value)
        else:
            raise DataError(f"has a part of type '{kind}', which is no text")
        learnt.add(_learnt(part) is not False)
    if len(learnt) > 1:
        raise DataError("has parts that are learnt from and parts that are not; flag whole answers")
    return {
        "content": "".join(said["content"]),
        **(
            {"reasoning_content": "\n".join(said["reasoning_content"])}
            if said["reasoning_content"]
            else {}
        ),
        **({"tool_calls": said["tool_calls"]} if said["tool_calls"] else {}),
        **({"weight": 0} if learnt == {False} else {}),
    }
