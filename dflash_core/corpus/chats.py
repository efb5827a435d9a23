"""One row to conversations: every shape in which people keep chats, in OpenAI messages.

Formats: ``messages`` (OpenAI), ``sharegpt`` (from/value), ``instruction`` (instruction, input,
output; question, answer; prompt, completion), ``history`` (user, bot), ``tree`` (replies), ``text``
and ``tokenised``. Nothing of a row is left out in silence: what cannot be taken is refused.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from dflash_core.artifacts import content_digest
from dflash_core.errors import DataError

__all__ = ["Conversation", "Format", "convert_row", "detect_format"]

Format = Literal["messages", "sharegpt", "instruction", "history", "tree", "text", "tokenised"]
FORMATS: tuple[Format, ...] = get_args(Format)

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
LISTS = ("messages", "conversations", "conversation", "history", "dialog", "chat", "question")
QUESTIONS = ("instruction", "question", "prompt", "query")
ANSWERS = ("output", "response", "answer", "completion", "canonical_solution", "chosen")
REASONING = ("reasoning_content", "reasoning", "thinking")
CONTENT_KEYS = ("text", "value", "answer", "content")
IDS = ("sample_id", "id", "uid", "conversation_id", "task_id", "question_id", "message_tree_id")


class Conversation(NamedTuple):
    """One conversation, or text, or already tokenised row.

    Attributes:
        messages: OpenAI messages with text contents; empty for text and token rows.
        tools: Schemas of the tools on offer.
        row_id: The row's own id; empty when it has none.
        group: What must not be split between train and held-out: the tree it belongs to.
        domain: The row's own domain; empty when it has none.
        text: Plain text.
        input_ids: Token ids of a tokenised row.
        loss_mask: Its mask.
    """

    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    row_id: str = ""
    group: str = ""
    domain: str = ""
    text: str | None = None
    input_ids: tuple[int, ...] | None = None
    loss_mask: tuple[int, ...] | None = None

    @property
    def content_hash(self) -> str:
        """Hash of what it says, whatever its file, id or key order."""
        said = (self.messages, self.tools, self.text, self.input_ids, self.loss_mask)
        return content_digest(said)


def detect_format(row: Any) -> Format:
    """Say what a row is.

    Raises:
        DataError: It is none of the formats; the message names its keys.
    """
    if isinstance(row, list):
        return _detect_list(row)
    if not isinstance(row, dict):
        raise DataError(f"is a {type(row).__name__}, not an object or a list of messages")
    if "input_ids" in row:
        return "tokenised"
    if isinstance(_first(row, QUESTIONS), str) and isinstance(_first(row, ANSWERS), str):
        return "instruction"
    for name in LISTS:
        value = row.get(name)
        if isinstance(value, str) and name != "question":
            value = _maybe_json(value)
        if isinstance(value, list):
            return _detect_list(value)
    prompt = row.get("prompt")
    if "replies" in row or (isinstance(prompt, dict) and "replies" in prompt):
        return "tree"
    if isinstance(row.get("turns"), list):
        return "history"
    if isinstance(row.get("text"), str):
        return "text"
    if _first(row, QUESTIONS) is not None:
        return "instruction"
    raise DataError(f"has no known chat format; its keys are {', '.join(map(str, row))[:200]}")


def convert_row(row: Any, form: Format | None = None) -> list[Conversation]:
    """Return the conversations of one row: one, or a tree's threads.

    Args:
        row: The parsed row.
        form: Its format; detected when not given.

    Raises:
        DataError: It is not of that format, or a part of it cannot be taken.
    """
    form = form or detect_format(row)
    if not isinstance(row, dict | list):
        raise DataError(f"is a {type(row).__name__}, not of format '{form}'")
    found = _CONVERTERS[form](row)
    if not isinstance(row, dict):
        return found
    row_id = str(next((v for v in map(row.get, IDS) if isinstance(v, str | int)), ""))
    domain = row["domain"] if isinstance(row.get("domain"), str) else ""
    tools = _tools(row.get("tools"))
    return [
        item._replace(
            row_id=f"{row_id}.{k}" if row_id and len(found) > 1 else row_id,
            domain=domain,
            tools=tools,
            group=_group(row, row_id, item),
        )
        for k, item in enumerate(found)
    ]


def _group(row: Mapping[str, Any], row_id: str, item: Conversation) -> str:
    if isinstance(row.get("group"), str):
        return row["group"]
    return item.group and (row_id or item.group)


def _detect_list(items: list[Any]) -> Format:
    item = items[0] if items else {}
    while isinstance(item, list) and item:
        item = item[0]
    if isinstance(item, dict):
        if "from" in item and "role" not in item:
            return "sharegpt"
        if "user" in item or "bot" in item:
            return "history"
    return "messages"


def _first(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    for name in names:
        value = row.get(name)
        if value is not None:
            return value
    return None


def _maybe_json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _message_list(row: Any) -> list[Any]:
    values = row if isinstance(row, list) else _maybe_json(_first(row, LISTS))
    if not isinstance(values, list):
        raise DataError(f"has no list of messages under any of {', '.join(LISTS)}")
    if values and all(isinstance(value, list) for value in values):
        values = [message for turn in values for message in turn]
    if not values:
        raise DataError("has an empty list of messages")
    return values


def _from_messages(row: Any) -> list[Conversation]:
    messages = [_message(value, k) for k, value in enumerate(_message_list(row))]
    if isinstance(row, dict) and isinstance(row.get("system"), str) and row["system"]:
        messages.insert(0, {"role": "system", "content": row["system"]})
    return [Conversation(messages=tuple(messages))]


def _message(value: Any, number: int) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"message {number} is a {type(value).__name__}, not an object")
    name = value.get("role", value.get("from"))
    role = ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise DataError(f"message {number} has the unknown role {name!r}")
    content = value.get("content", value.get("value", value.get("text")))
    if role == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": [_tool_call(content, number)]}
    message: dict[str, Any] = {"role": role, **_content(content, number)}
    calls = list(message.get("tool_calls", ()))
    calls += [_tool_call(call, number) for call in value.get("tool_calls") or ()]
    if value.get("function_call"):
        calls.append(_tool_call(value["function_call"], number))
    if calls:
        message["tool_calls"] = calls
    reasoning = _first(value, REASONING)
    if isinstance(reasoning, str) and reasoning and role == "assistant":
        message["reasoning_content"] = reasoning
    if value.get("cut_off") is True:
        message["cut_off"] = True
    if content is None and not calls:
        raise DataError(f"message {number} of role '{role}' has no content")
    return message


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
        raise DataError(f"message {number} has a content of type {type(content).__name__}")
    texts, thoughts, calls = [], [], []
    for part in content:
        kind = "text" if isinstance(part, str) else _part_kind(part, number)
        value = part if isinstance(part, str) else _first(part, ("text", "value", "content"))
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
        raise DataError(f"message {number} has a content part of type {type(part).__name__}")
    return str(part.get("type", "text"))


def _tool_call(call: Any, number: int) -> dict[str, Any]:
    """Return a call as OpenAI's object, its arguments as an object wherever they are one."""
    call = _maybe_json(call)
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"message {number} has a tool call without a function name")
    given = function.get("arguments", function.get("parameters", {}))
    parsed = _maybe_json(given)
    arguments = parsed if isinstance(parsed, dict) else given
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    tools = _maybe_json(value)
    if not tools:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError("has tools that are not a list of objects")
    return tuple(
        tool if "function" in tool else {"type": "function", "function": tool} for tool in tools
    )


def _from_instruction(row: Any) -> list[Conversation]:
    row = row if isinstance(row, dict) else {}
    question, answer = _first(row, QUESTIONS), _first(row, ANSWERS)
    if isinstance(question, list):  # prompt and completion as lists of messages
        return _from_messages([*question, *(answer if isinstance(answer, list) else ())])
    if not isinstance(question, str):
        raise DataError(f"has no text under any of {', '.join(QUESTIONS)}")
    given = row.get("input") or ""
    if not isinstance(given, str):
        raise DataError(f"has an input of type {type(given).__name__}, not text")
    messages: list[dict[str, Any]] = []
    if isinstance(row.get("system"), str) and row["system"]:
        messages.append({"role": "system", "content": row["system"]})
    for asked, answered in row.get("history") or ():
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": answered})
    messages.append({"role": "user", "content": f"{question}\n\n{given}" if given else question})
    if answer is not None:
        if not isinstance(answer, str):
            raise DataError(f"has an answer of type {type(answer).__name__}, not text")
        messages.append({"role": "assistant", "content": answer})
    return [Conversation(messages=tuple(messages))]


def _from_history(row: Any) -> list[Conversation]:
    turns = row if isinstance(row, list) else _first(row, ("history", "turns", *LISTS))
    if not isinstance(turns, list) or not turns:
        raise DataError("has an empty history" if turns == [] else "has no list of turns")
    messages: list[dict[str, str]] = []
    for k, turn in enumerate(turns):
        if isinstance(turn, str):
            turn = {"user": turn}
        if not isinstance(turn, dict) or not isinstance(turn.get("user"), str):
            raise DataError(f"turn {k} has no text under 'user'")
        messages.append({"role": "user", "content": turn["user"]})
        answer = turn.get("bot", turn.get("assistant"))
        if answer is not None:
            if not isinstance(answer, str):
                raise DataError(f"turn {k} has an answer of type {type(answer).__name__}")
            messages.append({"role": "assistant", "content": answer})
    return [Conversation(messages=tuple(messages))]


def _from_tree(row: Any) -> list[Conversation]:
    if isinstance(row, dict) and isinstance(row.get("prompt"), dict):
        row = row["prompt"]
    if not isinstance(row, dict):
        raise DataError("is a list, not a tree of replies")
    root = row
    group = str(root.get("message_id") or content_digest(root))
    return [Conversation(messages=tuple(path), group=group) for path in _threads(root)]


def _threads(root: Any) -> Iterator[list[Mapping[str, Any]]]:
    """Yield each path from the root to a leaf, in the order of the replies."""
    waiting: list[tuple[Any, list[Mapping[str, Any]]]] = [(root, [])]
    while waiting:
        node, path = waiting.pop()
        path = [*path, _message(node, len(path))]
        replies = node.get("replies") or ()
        if not replies:
            yield path
        waiting.extend((reply, path) for reply in reversed(replies))


def _from_text(row: Any) -> list[Conversation]:
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str) or not text:
        raise DataError("has no text under 'text'")
    return [Conversation(text=text)]


def _from_tokens(row: Any) -> list[Conversation]:
    ids = row.get("input_ids") if isinstance(row, dict) else None
    mask = None if ids is None else row.get("loss_mask")
    if ids is not None and mask is None and isinstance(row.get("labels"), list):
        mask = [int(label != -100) for label in row["labels"]]
    for name, values in (("input_ids", ids), ("loss_mask", mask)):
        if not isinstance(values, list) or not all(type(v) in (int, bool) for v in values):
            raise DataError(f"has no list of integers under '{name}' (a mask may be 'labels')")
    assert ids is not None and mask is not None
    if len(ids) != len(mask):
        raise DataError(f"has {len(ids)} token ids but a mask of {len(mask)}")
    return [Conversation(input_ids=tuple(ids), loss_mask=tuple(map(int, mask)))]


_CONVERTERS: dict[Format, Callable[[Any], list[Conversation]]] = {
    "messages": _from_messages,
    "sharegpt": _from_messages,
    "instruction": _from_instruction,
    "history": _from_history,
    "tree": _from_tree,
    "text": _from_text,
    "tokenised": _from_tokens,
}
