"""One message or tool schema, however a chat file spells it, as OpenAI's."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_core.errors import DataError

__all__ = ["first_of", "kind_of", "maybe_json", "thought_of", "to_message", "to_tools"]

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
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
REASONING = ("reasoning_content", "reasoning", "thinking")
CONTENT_KEYS = ("text", "value", "answer", "content")


def kind_of(value: Any) -> str:
    """Return the name of a value's type, for messages about it."""
    return type(value).__name__


def first_of(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the value under the first name that has one; None when none has."""
    for name in names:
        value = row.get(name)
        if value is not None:
            return value
    return None


def maybe_json(value: Any) -> Any:
    """Return what a string holds as JSON, or the value itself."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def thought_of(row: Mapping[str, Any], where: str) -> dict[str, str]:
    """Return the thought that stands beside an answer, as a part of its message.

    Raises:
        DataError: It is no text.
    """
    thought = first_of(row, REASONING)
    if thought is not None and not isinstance(thought, str):
        raise DataError(f"{where}has a thought of type {kind_of(thought)}, not text")
    return {"reasoning_content": thought} if thought else {}


def to_message(value: Any, number: int) -> dict[str, Any]:
    """Return an OpenAI message with a text content.

    An answer of ``weight`` 0 keeps it, and carries no loss.

    Raises:
        DataError: It is none, or a part of it cannot be taken; the message names ``number``.
    """
    if not isinstance(value, dict):
        raise DataError(f"message {number} is a {kind_of(value)}, not an object")
    name = value.get("role", value.get("from"))
    role = ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise DataError(f"message {number} has the unknown role {name!r}")
    content = value.get("content", value.get("value", value.get("text")))
    if role == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": [_tool_call(content, number)]}
    message: dict[str, Any] = {"role": role, **_content(content, number)}
    calls = list(message.get("tool_calls", ()))
    given = maybe_json(value.get("tool_calls")) or ()
    if not isinstance(given, list | tuple):
        raise DataError(f"message {number} has tool calls of type {kind_of(given)}, not a list")
    calls += [_tool_call(call, number) for call in given]
    if value.get("function_call"):
        calls.append(_tool_call(value["function_call"], number))
    if calls:
        message["tool_calls"] = calls
    if role == "assistant":
        message |= {**thought_of(value, f"message {number} "), **_weight(value, number)}
    if value.get("cut_off") is True:
        message["cut_off"] = True
    if content is None and not calls:
        raise DataError(f"message {number} of role '{role}' has no content")
    return message


def _weight(value: Mapping[str, Any], number: int) -> dict[str, int]:
    weight = value.get("weight")
    if weight not in (None, 0, 1):
        raise DataError(f"message {number} has the weight {weight!r}, which is neither 0 nor 1")
    return {"weight": 0} if weight == 0 else {}


def _content(content: Any, number: int) -> dict[str, Any]:
    """Return content, reasoning and tool calls of a string, a list of parts, or a dict."""
    if content is None or isinstance(content, str):
        return {"content": content or ""}
    if isinstance(content, dict):
        texts = [content[key] for key in CONTENT_KEYS if isinstance(content.get(key), str)]
        if len(texts) != 1:
            raise DataError(
                f"message {number} has a content object of keys {', '.join(map(str, content))}, "
                f"not one text under {', '.join(CONTENT_KEYS)}"
            )
        return {"content": texts[0]}
    if not isinstance(content, list):
        raise DataError(f"message {number} has a content of type {kind_of(content)}")
    texts, thoughts, calls = [], [], []
    for part in content:
        kind = "text" if isinstance(part, str) else _part_kind(part, number)
        value = part if isinstance(part, str) else first_of(part, ("text", "value", "content"))
        if kind in ("text", "input_text", "output_text") and isinstance(value, str):
            texts.append(value)
        elif kind in ("reasoning", "thinking") and isinstance(part, dict):
            thoughts.append(str(value if value is not None else part.get(kind, "")))
        elif kind == "tool_call":
            calls.append(_tool_call(value if value is not None else part, number))
        else:
            raise DataError(f"message {number} has a part of type '{kind}', which is no text")
    message: dict[str, Any] = {"content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _part_kind(part: Any, number: int) -> str:
    if not isinstance(part, dict):
        raise DataError(f"message {number} has a content part of type {kind_of(part)}")
    return str(part.get("type", "text"))


def _tool_call(call: Any, number: int) -> dict[str, Any]:
    """Return a call as OpenAI's object, its arguments as an object wherever they are one."""
    call = maybe_json(call)
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"message {number} has a tool call without a function name")
    given = function.get("arguments", function.get("parameters", {}))
    parsed = maybe_json(given)
    arguments = parsed if isinstance(parsed, dict) else given
    if parsed is given:
        json.dumps(given)  # Parquet holds dates and bytes, which no template takes
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def to_tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Return the schemas of a row's tools.

    Raises:
        DataError: They are no list of objects.
    """
    tools = maybe_json(value)
    if not tools:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError("has tools that are not a list of objects")
    if tools is value:
        json.dumps(tools)
    return tuple(
        tool if "function" in tool else {"type": "function", "function": tool} for tool in tools
    )
