"""Where the assistant's own text stands in a rendered conversation, proved from the template.

A template is a program: it drops roles it does not know, strips answers, renders the same turn
differently by position. So nothing is assumed about it. Either the template marks what is generated
(``{% generation %}``), or the spans are found by rendering twice: once as it is, once with every
content replaced by a private placeholder. The second text, cut at the placeholders, is the
template's own share, the *literals*; it depends only on the conversation's shape and is kept. The
first text must then be literal, content, literal, content, ... to its last character, which proves
the spans. Where it is not (thoughts, tool calls, trimmed text), each assistant turn is located
alone: the conversation is rendered with only that turn replaced, and what stands before and after
must be the same.

An answer starts where the generation prompt ends, since what the prompt already gives is never
generated, and ends behind its end-of-turn token.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_core.corpus.masking.template import ChatTemplate
from dflash_core.corpus.masking.witnesses import check_rendered
from dflash_core.errors import DataError

__all__ = ["Message", "Rendering", "TurnFinder"]

Message = Mapping[str, Any]
Span = tuple[int, int]

OPEN, CLOSE = "\U000f1d02", "\U000f1d03"
PLACEHOLDER = re.compile(f"{OPEN}([0-9]+){CLOSE}")
NESTED = ("reasoning_content", "tool_calls")
MAX_SKELETONS = 4_096


@dataclass(frozen=True)
class Rendering:
    """A rendered conversation.

    Attributes:
        text: What the template makes of it.
        spans: Start and end in ``text`` of each assistant turn's own text with its end-of-turn
            token, in order; empty for a turn of weight 0.
        control_spans: Where ``text`` holds the letters of a control token that the template did
            not write; they must stay letters.
    """

    text: str
    spans: list[Span]
    control_spans: list[Span]


@dataclass(frozen=True)
class _Skeleton:
    """The template's own text for one shape: ``literals[k]`` stands before content ``k``."""

    literals: list[str]
    in_order: bool
    num_controls: int
    nested: bool
    dropped: list[int]


class TurnFinder:
    """Renders conversations with one template and finds the assistant turns.

    Args:
        template: The chat template.
        control_tokens: Texts of the tokenizer's special tokens.
    """

    def __init__(self, template: ChatTemplate, control_tokens: Sequence[str]) -> None:
        self.template = template
        pattern = "|".join(re.escape(t) for t in sorted(control_tokens, key=len, reverse=True))
        self._control = re.compile(pattern or r"(?!)")
        self._skeletons: dict[tuple[object, ...], _Skeleton] = {}
        self._prompts: list[str] | None = None
        self._closing = ""  # behind the last answer, where the template writes no end
        self.end_tokens = self._find_end_tokens()
        self._end = re.compile(rf"\s*(?:{'|'.join(map(re.escape, self.end_tokens)) or '(?!)'})")

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Message] | None = None
    ) -> Rendering:
        """Render a conversation of OpenAI messages whose contents are strings.

        Raises:
            DataError: The template refuses it, drops a message, or hides where an answer stands.
        """
        skeleton = self._skeleton(messages, tools)
        for k in skeleton.dropped:
            _check_dropped(messages[k], k)
        if skeleton.nested or tools:
            check_rendered(self.template, messages, tools)
        if self.template.has_marks:
            text, marked = self.template.render_marked(messages, tools=tools)
            turns = [message for message in messages if message["role"] == "assistant"]
            if len(marked) != len(turns):
                raise DataError(
                    f"the chat template marks {len(marked)} generated spans for {len(turns)} "
                    "assistant turns; mend its generation marks or remove them"
                )
            spans = [
                self._with_end(text, start, end, message)
                for (start, end), message in zip(marked, turns, strict=True)
            ]
        else:
            text = self.template.render(messages, tools=tools)
            spans = self._walk(text, messages, skeleton)
            if spans is None:
                spans = self._locate_each(text, messages, tools)
        controls = self._foreign_controls(text, messages, tools, skeleton)
        goes_on = any(messages[-1].get(name) for name in ("cut_off", "tool_calls"))
        if self._closing and not goes_on and spans and spans[-1][1] == len(text):
            text += self._closing
            spans[-1] = spans[-1][0], len(text)
        return Rendering(text, _without_weightless(spans, messages), controls)

    def render_prompt(
        self, messages: Sequence[Message], *, tools: Sequence[Message] | None = None
    ) -> Rendering:
        """Render a conversation up to where the next answer starts; it has no spans.

        Raises:
            DataError: The template refuses it.
        """
        text = self.template.render(messages, tools=tools, add_generation_prompt=True)
        controls: list[Span] = []
        if self._control.search("".join(message["content"] for message in messages)):
            controls = self._disguised_controls(text, messages, tools, prompt=True)
        return Rendering(text, [], controls)

    def _skeleton(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> _Skeleton:
        shape = tuple(
            (message["role"], *(name in message for name in NESTED)) for message in messages
        )
        if tools:
            return self._render_skeleton(messages, tools)
        found = self._skeletons.get(shape)
        if found is None:
            found = self._render_skeleton(messages, tools)
            if len(self._skeletons) >= MAX_SKELETONS:
                self._skeletons.clear()
            self._skeletons[shape] = found
        return found

    def _render_skeleton(
        self, messages: Sequence[Message], tools: Sequence[Message] | None
    ) -> _Skeleton:
        text = self.template.render(
            [{**message, "content": _placeholder(k)} for k, message in enumerate(messages)],
            tools=tools,
        )
        order = [int(number) for number in PLACEHOLDER.findall(text)]
        return _Skeleton(
            literals=PLACEHOLDER.sub(OPEN, text).split(OPEN),
            in_order=order == list(range(len(messages))),
            num_controls=len(self._control.findall(text)),
            nested=any(name in message for message in messages for name in NESTED),
            dropped=sorted(set(range(len(messages))).difference(order)),
        )

    def _walk(
        self, text: str, messages: Sequence[Message], skeleton: _Skeleton
    ) -> list[Span] | None:
        """Match literal, content, literal, ... to the end of the text; None where it differs."""
        if not skeleton.in_order:
            return None
        literals = skeleton.literals
        if not text.startswith(literals[0]):
            return None
        spans = []
        position = len(literals[0])
        for k, message in enumerate(messages):
            if (
                skeleton.nested
                and message["role"] == "assistant"
                and any(name in message for name in NESTED)
            ):
                return None
            following = literals[k + 1]
            content = message["content"]
            end = position + len(content)
            if not (text.startswith(content, position) and text.startswith(following, end)):
                content = content.strip()
                end = position + len(content)
                if not (text.startswith(content, position) and text.startswith(following, end)):
                    return None
            if message["role"] == "assistant":
                spans.append(self._with_end(text, position, end, message))
            position = end + len(following)
        return spans if position == len(text) else None

    def _locate_each(
        self, text: str, messages: Sequence[Message], tools: Sequence[Message] | None
    ) -> list[Span]:
        return [
            self._locate(text, messages, k, tools)
            for k, message in enumerate(messages)
            if message["role"] == "assistant"
        ]

    def _locate(
        self, text: str, messages: Sequence[Message], k: int, tools: Sequence[Message] | None
    ) -> Span:
        plain = {"role": "assistant", "content": _placeholder(k)}
        variant = self.template.render([*messages[:k], plain, *messages[k + 1 :]], tools=tools)
        head, _, tail = variant.partition(plain["content"])
        end = len(text) - len(tail)
        start = len(head) if text.startswith(head) else self._after_prompt(text, head)
        if start is None or not text.endswith(tail) or end < start:
            raise DataError(
                f"the chat template hides where the answer in message {k} stands: the text around "
                "it changes with it; mark it with {% generation %} in the template"
            )
        return self._with_end(text, start, end, messages[k])

    def _after_prompt(self, text: str, head: str) -> int | None:
        """Return where the answer starts when it opens otherwise than a plain one: with a thought.

        ``head`` ends with a generation prompt (or the plain part of one); in ``text`` another
        variant of it stands at the same place.
        """
        prompts = self._generation_prompts()
        bases = {head[: -len(prompt)] for prompt in prompts if prompt and head.endswith(prompt)}
        if not bases:
            return None
        base = min(bases, key=len)
        starts = [len(base) + len(prompt) for prompt in prompts if text.startswith(base + prompt)]
        return max(starts, default=None)

    def _generation_prompts(self) -> list[str]:
        if self._prompts is None:
            messages = [{"role": "user", "content": _placeholder(0)}]
            plain = self.template.render(messages)
            prompts = []
            for extra in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
                text = self.template.render(messages, add_generation_prompt=True, extra=extra)
                prompts.append(text.removeprefix(plain) if text.startswith(plain) else "")
            self._prompts = prompts
        return self._prompts

    def _with_end(self, text: str, start: int, end: int, message: Message) -> Span:
        """Let a span end behind its end-of-turn token, or before it where the target had none."""
        if message.get("cut_off"):
            body = text[start:end]
            thought = str(message.get("reasoning_content") or "").strip()
            if thought and not message["content"].strip():
                # Cut off inside its thought, which the template closes and the target did not.
                _, found, behind = body.rpartition(thought)
                return start, end - len(behind) if found else start
            token = next((t for t in self.end_tokens if body.endswith(t)), "")
            return start, end - len(token)
        following = self._end.match(text, end)
        return start, following.end() if following else end

    def _find_end_tokens(self) -> list[str]:
        """Return the control tokens by which the template closes assistant turns.

        Nothing follows the last answer of a conversation but its end. Behind an earlier answer the
        next turn's opening follows too, which the generation prompt tells apart. Where nothing at
        all follows the last answer, it ends with the token that opens the next turn, as GLM's do
        (``<|user|>`` and ``<|observation|>`` in its generation_config.json): the target writes
        it, so it is supervised, behind the last answer as if a user went on.
        """
        user = {"role": "user", "content": _placeholder(0)}
        answer = {"role": "assistant", "content": _placeholder(1)}
        last = self._control_behind_answer([user, answer])
        again = {"role": "user", "content": _placeholder(2)}
        earlier = self._control_behind_answer([user, answer, again])
        if last is None:
            own = PLACEHOLDER.split(self.template.render([user, answer]))[2]
            if earlier is None or earlier in own:
                return []
            self._closing = earlier
            return sorted({earlier, *self._openings_of_tools([user, answer])})
        opening = "".join(self._generation_prompts())
        found = {last} if earlier is None or earlier in opening else {last, earlier}
        return sorted(found)

    def _openings_of_tools(self, messages: Sequence[Message]) -> list[str]:
        result = {"role": "tool", "content": _placeholder(2)}
        try:
            token = self._control_behind_answer([*messages, result])
        except DataError:  # no tools here
            return []
        return [] if token is None else [token]

    def _control_behind_answer(self, messages: Sequence[Message]) -> str | None:
        text = self.template.render(messages)
        behind = PLACEHOLDER.sub(OPEN, text).split(OPEN)[2]
        token = self._control.match(behind.lstrip())
        return token.group() if token else None

    def _foreign_controls(
        self,
        text: str,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        skeleton: _Skeleton,
    ) -> list[Span]:
        if not skeleton.nested and len(self._control.findall(text)) == skeleton.num_controls:
            return []
        return self._disguised_controls(text, messages, tools, prompt=False)

    def _disguised_controls(
        self,
        text: str,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        *,
        prompt: bool,
    ) -> list[Span]:
        matches = self._control.finditer(text)
        twin = self.template.render(
            self._disguise(messages), tools=self._disguise(tools), add_generation_prompt=prompt
        )
        if len(twin) != len(text):
            raise DataError(
                "a message holds the text of a control token where the chat template cannot be "
                "told apart from it; remove it from the message"
            )
        return [match.span() for match in matches if twin[match.start()] != text[match.start()]]

    def _disguise(self, value: Any) -> Any:
        """Return a copy whose control-token texts start with a private character instead."""
        if isinstance(value, str):
            return self._control.sub(lambda match: OPEN + match.group()[1:], value)
        if isinstance(value, Mapping):
            return {key: self._disguise(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._disguise(item) for item in value]
        return value


def _check_dropped(message: Message, number: int) -> None:
    if not message.get("tool_calls"):
        raise DataError(
            f"the chat template drops message {number} of role '{message['role']}'; map the role "
            "to one that the template renders"
        )
    # That the calls are there is checked on a twin.
    if message["content"].strip():
        raise DataError(
            f"the chat template drops the text beside the tool call in message {number}; remove "
            "it or use a template that renders both"
        )


def _without_weightless(spans: Sequence[Span], messages: Sequence[Message]) -> list[Span]:
    """Empty the spans of answers of weight 0: they are context, not to be learnt from."""
    answers = [message for message in messages if message["role"] == "assistant"]
    return [
        (start, start if message.get("weight") == 0 else end)
        for (start, end), message in zip(spans, answers, strict=True)
    ]


def _placeholder(number: int) -> str:
    return f"{OPEN}{number}{CLOSE}"
