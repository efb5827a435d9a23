"""Chat templates: rendering as the server does it, and where the template says an answer stands.

The sandboxed environment has what ``transformers`` gives a template (``tojson`` without HTML
escapes, ``raise_exception``, ``strftime_now``, loop controls, ``{% generation %}``), with two
differences: the clock is a setting, so that the same chats give the same bytes on every day, and
attribute look-ups in messages take a short cut.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from dflash_core.artifacts import content_digest
from dflash_core.errors import ConfigError, DataError

__all__ = ["ChatTemplate"]

# `message.items` is a method to Jinja, `message.role` is not: only the latter takes the short cut.
_DICT_ATTRIBUTES = frozenset(dir(dict))
# What the sandbox would allow after a long look: str.format alone has a door to attributes.
_STR_METHODS = frozenset(n for n in dir(str) if n[0] != "_" and n not in ("format", "format_map"))
_LOOP_ATTRIBUTES = frozenset(name for name in dir(LoopContext) if name[0] != "_")

MARKS = ("\U000f1d00", "\U000f1d01")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with short cuts to the look-ups of which chat templates are made."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if (kind is str and attribute in _STR_METHODS) or (
            kind is LoopContext and attribute in _LOOP_ATTRIBUTES
        ):
            return getattr(obj, attribute)
        if kind is Namespace and not attribute.startswith("_"):
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


class _GenerationMarks(jinja2.ext.Extension):
    """``{% generation %}`` wraps its body in two private characters that no chat contains."""

    tags = {"generation"}  # noqa: RUF012  (read by Jinja as a class attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks = [nodes.Output([nodes.TemplateData(mark)]).set_lineno(line) for mark in MARKS]
        return [marks[0], *body, marks[1]]


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja source, usually ``tokenizer.chat_template``.
        variables: Values every rendering sees: special tokens, ``enable_thinking`` and the like.
        today: What ``strftime_now`` tells the template.

    Raises:
        ConfigError: The source is not a valid template.
    """

    def __init__(
        self,
        source: str,
        *,
        variables: Mapping[str, Any] | None = None,
        today: date = date(2026, 1, 1),
    ) -> None:
        environment = _Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationMarks, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(
            raise_exception=_raise_exception, strftime_now=lambda form: today.strftime(form)
        )
        self.variables = dict(variables or {})
        self.digest = content_digest(source, self.variables, today.isoformat())
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template is not valid Jinja: {error.message} (line {error.lineno}); "
                "give a tokenizer folder with a working chat_template"
            ) from None
        self._globals = dict(self._template.globals)
        self.has_marks = re.search(r"{%[-+]?\s*endgeneration\b", source) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation, without marks.

        Raises:
            DataError: The template refuses the conversation; the message says why.
        """
        text = self._render(messages, tools, add_generation_prompt, extra)
        return text.replace(MARKS[0], "").replace(MARKS[1], "") if self.has_marks else text

    def render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text and the spans that the template marks as generated."""
        text, spans, start = [], [], 0
        position = 0
        for piece in re.split(f"([{''.join(MARKS)}])", self._render(messages, tools, False, None)):
            if piece == MARKS[0]:
                start = position
            elif piece == MARKS[1]:
                spans.append((start, position))
            else:
                text.append(piece)
                position += len(piece)
        return "".join(text), spans

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        extra: Mapping[str, Any] | None,
    ) -> str:
        variables = {
            **self._globals,
            **self.variables,
            **(extra or {}),
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            # What Template.render does, without walking a chain of globals each time.
            context = self._template.new_context(variables, shared=True)
            return "".join(self._template.root_render_func(context))
        except Exception as error:  # whatever the template's program raises
            raise DataError(f"the chat template refuses the conversation: {error}") from None


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
