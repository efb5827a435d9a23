"""Whether a template renders a conversation's calls, schemas and thoughts, proved by a twin.

Their words may stand elsewhere in the text, so they prove nothing. In the twin each name of a tool,
each call's arguments and each thought is, or holds, a word of its own, which must then be seen.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dflash_core.corpus.masking.template import ChatTemplate
from dflash_core.errors import DataError

__all__ = ["check_rendered"]

Objects = Sequence[Mapping[str, Any]]


def check_rendered(template: ChatTemplate, messages: Objects, tools: Objects | None) -> None:
    """Refuse a conversation of which the template drops a call, a schema or a thought.

    A thought need not be rendered behind later turns, only when its own answer is the last; that of
    an answer that was cut off may be lost with it.

    Raises:
        DataError: It drops one; the message names it.
    """
    said: dict[str, str] = {}
    thoughts: dict[str, int] = {}

    def word(what: str) -> str:
        said[f"Zq{len(said)}qZ"] = what
        return next(reversed(said))

    def twin_of(number: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
        twin = dict(message)
        if message.get("reasoning_content") and not message.get("cut_off"):
            twin["reasoning_content"] = word(f"the thought in message {number}")
            thoughts[twin["reasoning_content"]] = number
        if calls := message.get("tool_calls"):
            where = f" in message {number}"
            twin["tool_calls"] = [_renamed(call, word, "call of ", where) for call in calls]
        return twin

    twins = [twin_of(k, message) for k, message in enumerate(messages)]
    schemas = [_renamed(tool, word) for tool in tools or ()] or None
    text = template.render(twins, tools=schemas)
    for witness, what in said.items():
        seen = witness in text
        if not seen and witness in thoughts:
            seen = witness in template.render(twins[: thoughts[witness] + 1], tools=schemas)
        if not seen:
            raise DataError(
                f"the chat template drops {what}; use a template that renders it or remove it"
            )


def _renamed(
    value: Mapping[str, Any], word: Callable[[str], str], of: str = "", where: str = ""
) -> dict[str, Any]:
    """Return a call or a schema with a word for its name and among its arguments."""
    function = dict(value.get("function", value))
    what = f"the {of}tool '{function.get('name', '')}'{where}"
    function["name"] = word(what)
    if isinstance(arguments := function.get("arguments"), Mapping) and arguments:
        witness = word(f"arguments of {what}")
        function["arguments"] = {**arguments, witness: witness}
    return {**value, "function": function} if "function" in value else function
