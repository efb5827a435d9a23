"""One row to conversations: every shape in which people keep chats, in OpenAI messages.

Formats: ``messages`` (OpenAI), ``sharegpt`` (from/value), ``instruction`` (instruction, input,
output; question, answer; prompt, completion; chosen, rejected), ``history`` (pairs: user, bot),
``tree`` (replies), ``text`` and ``tokenised``. What is said in a row is not left out in silence:
what cannot be taken is refused, and so is a row that says two things in one part. A list of
messages says all by itself; one that ends before its answer is continued by what stands beside it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from dflash_core.artifacts import content_digest
from dflash_core.corpus.masking.tools import is_call, to_calls, to_tools
from dflash_core.corpus.preparing.keys import (
    ANSWERS,
    CHATS,
    IDS,
    INPUTS,
    LISTS,
    PREFERRED,
    QUESTIONS,
    SYSTEMS,
    TOOLS,
    TURNS,
    UNREAD_IN_ROWS,
    chat_of,
    chat_under,
    check_keys,
    check_wanted,
    kind_of,
    looks_like_chat,
    maybe_json,
    only,
    opened,
    text_under,
    told_keys,
    unknown_chats,
)
from dflash_core.corpus.reading.messages import thought_of, to_message, to_messages
from dflash_core.corpus.reading.tokens import to_tokens
from dflash_core.errors import DataError

__all__ = ["Conversation", "Format", "convert_row", "detect_format"]

Format = Literal["messages", "sharegpt", "instruction", "history", "tree", "text", "tokenised"]
FORMATS: tuple[Format, ...] = get_args(Format)
Messages = list[Mapping[str, Any]]

# Names that ask and answer, in rows and in turns; the later ones where no earlier one is there.
ASKED = (QUESTIONS, ("user", "human"))
ANSWERED = (ANSWERS, ("bot", "assistant", "gpt"), ("answers",))
NO_COLUMNS: Mapping[str, str] = {}


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


def detect_format(row: Any, columns: Mapping[str, str] = NO_COLUMNS) -> Format:
    """Say what a row is.

    Raises:
        DataError: It is none of the formats; the message names its keys.
    """
    if isinstance(row, list):
        return _detect_list(row)
    if not isinstance(row, dict):
        raise DataError(f"is a {kind_of(row)}, not an object or a list of messages")
    row = opened(row, columns)
    form: Format | None = next((form for holds, form in _SIGNS if holds(row)), None)
    if form is None:
        raise DataError(f"has no known chat format; {told_keys(row)}")
    return _detect_list(_values(row)) if form == "messages" else form


def convert_row(
    row: Any, form: Format | None = None, columns: Mapping[str, str] = NO_COLUMNS
) -> list[Conversation]:
    """Return the conversations of one row: one, or a tree's threads.

    Args:
        row: The parsed row.
        form: Its format; detected when not given.
        columns: Which key of the rows is what, such as ``{"messages": "traj"}``.

    Raises:
        DataError: It is not of that format, or a part of it cannot be taken.
    """
    try:
        if isinstance(row, dict):
            row = opened(row, columns)
        form = form or detect_format(row)
        if not isinstance(row, dict | list):
            raise DataError(f"is a {kind_of(row)}, not of format '{form}'")
        found = _CONVERTERS[form](row)
        return _named(row, found) if isinstance(row, dict) else found
    except DataError:
        raise
    except RecursionError:
        raise DataError("is nested too deeply") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # Of one row among millions; a run must not end with it.
        raise DataError(f"has an unknown shape ({kind_of(error)}: {error})") from error


def _named(row: Mapping[str, Any], found: Sequence[Conversation]) -> list[Conversation]:
    """Add what a row says beside its conversations, or refuse it."""
    if any(item.messages for item in found):
        check_keys(row, UNREAD_IN_ROWS)
        check_wanted(row)
    row_id = str(next((v for v in map(row.get, IDS) if isinstance(v, str | int)), ""))
    domain = row["domain"] if isinstance(row.get("domain"), str) else ""
    tools = only({name: to_tools(row.get(name)) for name in TOOLS}, TOOLS)
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
    if not isinstance(item, dict) or "role" in item:
        return "messages"
    if "from" in item:
        return "sharegpt"
    return "history" if _is_turn(item) else "messages"


def _is_turn(item: Mapping[str, Any]) -> bool:
    return _asked(item) is not None or ("input" in item and _answer(item) is not None)


def _values(row: Any) -> Any:
    """Return the list of turns that a row is or holds."""
    return row if isinstance(row, list) else chat_under(row, CHATS) or chat_under(row, LISTS)


def _asked(row: Mapping[str, Any]) -> Any:
    """Return what is asked in a row or a turn; None when nothing is."""
    return next((v for names in ASKED if (v := only(row, names)) is not None), None)


def _answer(row: Mapping[str, Any]) -> Any:
    """Return what answers there: a text, a message, a list of messages or of tool calls."""
    chosen = chat_of(only(row, PREFERRED))
    if looks_like_chat(chosen):
        return chosen
    return next((v for names in ANSWERED if (v := only(row, names)) is not None), None)


def _is_exchange(row: Mapping[str, Any]) -> bool:
    """Say whether a row asks and goes on, and holds no list of turns that would say it all."""
    if chat_under(row, CHATS):
        return False
    asked, answer = _asked(row), _answer(row)
    if asked is None:
        return looks_like_chat(answer) or (answer is not None and bool(row.get("input")))
    continued = answer is not None or isinstance(maybe_json(row.get("history")), list)
    return isinstance(asked, str | list) and continued


def _from_turns(row: Any) -> list[Conversation]:
    if isinstance(row, list):
        return _conversation(_messages(row))
    values = chat_under(row, CHATS) or chat_under(row, TURNS)
    if values is None:
        raise DataError(f"has no list of messages under any of {', '.join(LISTS)}")
    messages = _messages(values) if _values(row) else _questions(values)
    said = _with_system(row, _continued(messages, row))
    # What a target answered is its own text, where it said nothing but the end of its turn too.
    return [Conversation(tuple(said))] if "regenerated" in row else _conversation(said)


def _questions(turns: list[Any]) -> Messages:
    """Return the messages of turns that may be nothing but questions."""
    return _messages([{"user": turn} if isinstance(turn, str) else turn for turn in turns])


def _messages(values: list[Any]) -> Messages:
    if _detect_list(values) != "history":
        return list(to_messages(values))
    messages: Messages = []
    for k, turn in enumerate(values):
        try:
            messages += _exchange(turn)
        except DataError as error:
            raise DataError(f"turn {k} {error}") from None
    return messages


def _from_exchange(row: Any) -> list[Conversation]:
    return _conversation(_exchange(row))


def _exchange(row: Any) -> Messages:
    """Return the messages of a row, or of a turn, that asks and may answer."""
    row = row if isinstance(row, dict) else {}
    asked, given = _asked(row), text_under(row, INPUTS)
    chat = asked if isinstance(asked, list) else chat_of(asked)
    messages = _earlier_turns(maybe_json(row.get("history")))
    if isinstance(asked, list) or looks_like_chat(chat):
        if given:
            raise DataError("has an input beside a list of messages, where it has no place")
        messages += _questions(chat or [])
    elif isinstance(asked, str) or given:
        text = "\n\n".join(part for part in (asked, given) if part)
        messages.append({"role": "user", "content": text})
    elif asked is not None or not looks_like_chat(_answer(row)):
        raise DataError(f"has no text under any of {', '.join(QUESTIONS)}")
    return _with_system(row, _continued(messages, row))


def _continued(messages: Messages, row: Mapping[str, Any]) -> Messages:
    """Return messages with the row's answer, which may hold them too, as in preferences.

    Raises:
        DataError: The answer continues something else.
    """
    closed = bool(messages) and messages[-1]["role"] == "assistant"
    given = only(row, PREFERRED) or None if closed else _answer(row)
    if given is None:
        return messages
    answer = _answer_messages(given, row)
    asked = [message for message in messages if message["role"] != "system"]
    begun = [message for message in answer if message["role"] != "system"]
    if begun[: len(asked)] == asked:  # a whole conversation
        same = len(begun) < len(answer)
        return answer if same else [*messages[: len(messages) - len(asked)], *answer]
    if closed and messages[-len(answer) :] == answer:
        return messages
    if closed or answer[0]["role"] != "assistant":
        raise DataError("has a chat and an answer that does not continue it; keep one of them")
    return [*messages, *answer]


def _answer_messages(given: Any, row: Mapping[str, Any]) -> Messages:
    if isinstance(given, dict):
        return [to_message(given, 0)]
    turns = chat_of(given)
    if turns and all(map(is_call, turns)):
        return [{"role": "assistant", "content": "", "tool_calls": to_calls(turns)}]
    if isinstance(given, list) or looks_like_chat(turns):
        return list(to_messages(turns or []))
    if not isinstance(given, str):
        raise DataError(f"has an answer of type {kind_of(given)}, not text")
    return [{"role": "assistant", "content": given, **thought_of(row)}]


def _with_system(row: Mapping[str, Any], messages: Messages) -> Messages:
    """Return messages that begin with the row's own system text, if it has one."""
    system = text_under(row, SYSTEMS)
    first: Messages = [{"role": "system", "content": system}] if system else []
    return [*(first if first != messages[:1] else ()), *messages]


def _conversation(messages: Messages) -> list[Conversation]:
    """Return messages as a conversation without empty answers, of which only the end is said.

    The last one is left out, as nothing was answered; an earlier one carries no loss.
    """
    while messages and _is_empty(messages[-1]):
        messages = messages[:-1]
    return [Conversation(tuple({**m, "weight": 0} if _is_empty(m) else m for m in messages))]


def _is_empty(message: Mapping[str, Any]) -> bool:
    said = (message["content"].strip(), *map(message.get, ("reasoning_content", "tool_calls")))
    return message["role"] == "assistant" and not any(said)


def _earlier_turns(turns: Any) -> Messages:
    """Return the turns before an instruction: pairs of texts, or what other formats take."""
    if not turns:
        return []
    if isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns):
        return _messages(turns)
    if not isinstance(turns, list) or not all(map(_is_pair, turns)):
        raise DataError("has a history of neither pairs of texts nor messages")
    return [
        {"role": role, "content": text}
        for pair in turns
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _is_pair(turn: Any) -> bool:
    return isinstance(turn, list) and len(turn) == 2 and all(isinstance(t, str) for t in turn)


def _from_tree(row: Any) -> list[Conversation]:
    if isinstance(row, dict) and isinstance(row.get("prompt"), dict):
        row = row["prompt"]
    if not isinstance(row, dict):
        raise DataError("is a list, not a tree of replies")
    group = str(row.get("message_id") or content_digest(row))
    return [_conversation(path)[0]._replace(group=group) for path in _threads(row)]


def _threads(root: Any) -> Iterator[Messages]:
    """Yield each path from the root to a leaf, in the order of the replies."""
    waiting: list[tuple[Any, Messages]] = [(root, [])]
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
    if "parent_id" in row and "role" in row:
        raise DataError(
            "is one message of a tree whose rows name their parent; give the file of whole trees, "
            "each with its replies"
        )
    return [Conversation(text=text)]


def _from_tokens(row: Any) -> list[Conversation]:
    ids, mask = to_tokens(row if isinstance(row, dict) else {})
    return [Conversation(input_ids=ids, loss_mask=mask)]


_CONVERTERS: dict[Format, Callable[[Any], list[Conversation]]] = {
    "messages": _from_turns,
    "sharegpt": _from_turns,
    "instruction": _from_exchange,
    "history": _from_turns,
    "tree": _from_tree,
    "text": _from_text,
    "tokenised": _from_tokens,
}

# What tells a format, in this order; a list of turns is looked at again.
_SIGNS: tuple[tuple[Callable[[Mapping[str, Any]], Any], Format], ...] = (
    (lambda row: "input_ids" in row, "tokenised"),
    (_is_exchange, "instruction"),
    (_values, "messages"),
    (lambda row: "replies" in row or isinstance(row.get("prompt"), dict), "tree"),
    (lambda row: isinstance(row.get("turns"), list), "history"),
    (lambda row: isinstance(row.get("text"), str), "text"),
    (lambda row: _asked(row) is not None and not unknown_chats(row), "instruction"),
    (lambda row: _values(row) is not None, "messages"),
)
