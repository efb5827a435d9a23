"""One row to conversations: every shape in which people keep chats, in OpenAI messages.

Formats: ``messages`` (OpenAI), ``sharegpt`` (from/value), ``instruction`` (instruction, input,
output; question, answer; prompt, completion), ``history`` (user, bot), ``tree`` (replies), ``text``
and ``tokenised``. What is said in a row is not left out in silence: what cannot be taken is
refused, and so is a row that says two things in one part. A list of messages says all by itself.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from dflash_core.artifacts import content_digest
from dflash_core.corpus.messages import (
    first_of,
    kind_of,
    maybe_json,
    thought_of,
    to_message,
    to_tools,
)
from dflash_core.errors import DataError

__all__ = ["Conversation", "Format", "convert_row", "detect_format"]

Format = Literal["messages", "sharegpt", "instruction", "history", "tree", "text", "tokenised"]
FORMATS: tuple[Format, ...] = get_args(Format)

CHATS = ("messages", "conversations", "conversation", "dialog", "chat")
LISTS = (*CHATS, "history", "question")
TURNS = (*LISTS, "turns")
SYSTEMS = ("system", "system_prompt")
QUESTIONS = ("instruction", "question", "prompt", "query")
INPUTS = ("input", "context")
ANSWERS = ("output", "response", "answer", "completion", "canonical_solution", "chosen")
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
        raise DataError(f"is a {kind_of(row)}, not an object or a list of messages")
    if "input_ids" in row:
        return "tokenised"
    question, answer = first_of(row, QUESTIONS), first_of(row, ANSWERS)
    continued = answer is not None or isinstance(maybe_json(row.get("history")), list)
    chat = _list_under(row, CHATS)
    if not chat and isinstance(question, str | list) and continued:
        return "instruction"
    values = chat or _list_under(row, LISTS)
    if values:
        return _detect_list(values)
    prompt = row.get("prompt")
    if "replies" in row or (isinstance(prompt, dict) and "replies" in prompt):
        return "tree"
    if isinstance(row.get("turns"), list):
        return "history"
    if isinstance(row.get("text"), str):
        return "text"
    if question is not None:
        return "instruction"
    if values is not None:
        return "messages"
    raise DataError(f"has no known chat format; its keys are {', '.join(map(str, row))[:200]}")


def convert_row(row: Any, form: Format | None = None) -> list[Conversation]:
    """Return the conversations of one row: one, or a tree's threads.

    Args:
        row: The parsed row.
        form: Its format; detected when not given.

    Raises:
        DataError: It is not of that format, or a part of it cannot be taken.
    """
    try:
        return _convert(row, form or detect_format(row))
    except DataError:
        raise
    except RecursionError:
        raise DataError("is nested too deeply") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # Of one row among millions; a run must not end with it.
        raise DataError(f"has an unknown shape ({kind_of(error)}: {error})") from error


def _convert(row: Any, form: Format) -> list[Conversation]:
    if not isinstance(row, dict | list):
        raise DataError(f"is a {kind_of(row)}, not of format '{form}'")
    found = _CONVERTERS[form](row)
    if not isinstance(row, dict):
        return found
    row_id = str(next((v for v in map(row.get, IDS) if isinstance(v, str | int)), ""))
    domain = row["domain"] if isinstance(row.get("domain"), str) else ""
    tools = to_tools(row.get("tools"))
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


def _list_under(row: Mapping[str, Any], names: Sequence[str]) -> list[Any] | None:
    """Return the list under one of the names, as it is or in JSON; None when there is none."""
    lists: dict[str, list[Any]] = {}
    for name in names:
        value = row.get(name)
        if isinstance(value, str) and name != "question":  # which may look like JSON
            value = maybe_json(value)
        if isinstance(value, list):
            lists[name] = value
    return _only(lists, names) if lists else None


def _only(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return what stands under one of several names for the same thing."""
    filled = [name for name in names if row.get(name)]
    if len(filled) > 1 and any(row[name] != row[filled[0]] for name in filled):
        raise DataError(f"says different things under {' and '.join(filled)}; keep one of them")
    return row[filled[0]] if filled else first_of(row, names)


def _text(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the text under one of the names; empty when there is none."""
    value = _only(row, names)
    if value is not None and not isinstance(value, str):
        raise DataError(f"has a {names[0]} of type {kind_of(value)}, not text")
    return value or ""


def _with_system(row: Any, messages: Sequence[Mapping[str, Any]]) -> list[Conversation]:
    """Return a conversation that begins with the row's own system text, if it has one."""
    system = _text(row, SYSTEMS) if isinstance(row, dict) else ""
    first = [{"role": "system", "content": system}] if system else []
    return [Conversation(messages=(*(first if first != messages[:1] else ()), *messages))]


def _from_messages(row: Any) -> list[Conversation]:
    values = row if isinstance(row, list) else _list_under(row, CHATS) or _list_under(row, LISTS)
    if values is None:
        raise DataError(f"has no list of messages under any of {', '.join(LISTS)}")
    return _with_system(row, _messages(values))


def _messages(values: list[Any]) -> list[Mapping[str, Any]]:
    if values and all(isinstance(value, list) for value in values):
        values = [message for turn in values for message in turn]
    if not values:
        raise DataError("has an empty list of messages")
    return [to_message(value, k) for k, value in enumerate(values)]


def _from_instruction(row: Any) -> list[Conversation]:
    row = row if isinstance(row, dict) else {}
    question, answer = _only(row, QUESTIONS), _only(row, ANSWERS)
    given = _text(row, INPUTS)
    messages = _earlier_turns(maybe_json(row.get("history")))
    if isinstance(question, list):  # prompt and completion as lists of messages
        if given:
            raise DataError("has an input beside a list of messages, where it has no place")
        messages += _messages(question)
    elif isinstance(question, str):
        asked = f"{question}\n\n{given}" if given else question
        messages.append({"role": "user", "content": asked})
    else:
        raise DataError(f"has no text under any of {', '.join(QUESTIONS)}")
    if isinstance(answer, list) and isinstance(question, list):
        messages += _messages(answer)
    elif isinstance(answer, str):
        messages.append({"role": "assistant", "content": answer, **thought_of(row, "")})
    elif answer is not None:
        raise DataError(f"has an answer of type {kind_of(answer)}, not text")
    return _with_system(row, messages)


def _earlier_turns(turns: Any) -> list[Mapping[str, Any]]:
    """Return the turns before an instruction: pairs of texts, or what other formats take."""
    if not turns:
        return []
    if isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns):
        return list(_CONVERTERS[_detect_list(turns)](turns)[0].messages)
    if not isinstance(turns, list) or not all(map(_is_pair, turns)):
        raise DataError("has a history of neither pairs of texts nor messages")
    return [
        {"role": role, "content": text}
        for pair in turns
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _is_pair(turn: Any) -> bool:
    return isinstance(turn, list) and len(turn) == 2 and all(isinstance(t, str) for t in turn)


def _from_history(row: Any) -> list[Conversation]:
    # In the order of `detect_format`: another list beside the chat is not what it says.
    turns = row if isinstance(row, list) else _list_under(row, CHATS) or _list_under(row, TURNS)
    if not isinstance(turns, list) or not turns:
        raise DataError("has an empty history" if turns == [] else "has no list of turns")
    messages: list[Mapping[str, Any]] = []
    for k, turn in enumerate(turns):
        if isinstance(turn, str):
            turn = {"user": turn}
        if not isinstance(turn, dict) or not isinstance(turn.get("user"), str):
            raise DataError(f"turn {k} has no text under 'user'")
        messages.append({"role": "user", "content": turn["user"]})
        answer = _only(turn, ("bot", "assistant"))
        if answer is not None:
            if not isinstance(answer, str):
                raise DataError(f"turn {k} has an answer of type {kind_of(answer)}")
            messages.append({"role": "assistant", "content": answer})
    return _with_system(row, messages)


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
        path = [*path, to_message(node, len(path))]
        replies = node.get("replies") or []
        if not isinstance(replies, list):
            raise DataError(f"has replies of type {kind_of(replies)}, not a list")
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
