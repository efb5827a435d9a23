"""Chats to token ids and a loss mask.

Each row is cut where an answer starts and ends, and the pieces are tokenised on their own: the
prompt exactly as a server tokenises it, the answer starting with a fresh token as generation does.
The mask then needs no character offsets and cannot cut a token in two.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dflash_core.artifacts import content_digest
from dflash_core.corpus.masking.spans import Message, Rendering, TurnFinder
from dflash_core.corpus.masking.template import ChatTemplate
from dflash_core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ChatEncoder", "EncodedChat", "Supervise"]

Supervise = Literal["all_turns", "last_turn_only"]


@dataclass(frozen=True)
class EncodedChat:
    """A tokenised conversation: int32 ids and the bool loss mask, both shape ``(length,)``."""

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]


class _Piece(NamedTuple):
    text: str
    supervised: bool
    as_letters: bool = False


@dataclass(frozen=True)
class _Ingredients:
    backend: Tokenizer
    template: str
    tool_template: str
    variables: Mapping[str, Any]
    control_tokens: tuple[str, ...]
    name: str


class ChatEncoder:
    """Turns conversations into token ids and loss masks with one tokenizer and its template.

    Args:
        tokenizer: A fast tokenizer.
        chat_template: Jinja source; the tokenizer's own when not given: of several named ones
            `default`, and `tool_use` where tools are given.
        template_variables: Values every rendering sees, such as ``enable_thinking``.

    Raises:
        ConfigError: No template, or not a fast tokenizer.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        chat_template: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> None:
        own = chat_template or tokenizer.chat_template
        named = own if isinstance(own, dict) else {"default": own}
        source = named.get("default")
        if not isinstance(source, str):
            raise ConfigError(
                f"tokenizer {tokenizer.name_or_path!r} has no chat template; give a tokenizer "
                "folder with one, or a template of its own"
            )
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(
                f"tokenizer {tokenizer.name_or_path!r} is not a fast tokenizer; give a folder with "
                "a tokenizer.json"
            )
        self._set_up(
            _Ingredients(
                backend=backend,
                template=source,
                tool_template=named.get("tool_use", source),
                variables={**_special_texts(tokenizer), **(template_variables or {})},
                control_tokens=tuple(_control_tokens(tokenizer)),
                name=tokenizer.name_or_path,
            )
        )

    def _set_up(self, ingredients: "_Ingredients") -> None:
        self._ingredients = ingredients
        self._backend = ingredients.backend
        finders = {
            source: TurnFinder(
                ChatTemplate(source, variables=ingredients.variables), ingredients.control_tokens
            )
            for source in (ingredients.template, ingredients.tool_template)
        }
        self._plain_finder = finders[ingredients.template]
        self._tool_finder = finders[ingredients.tool_template]
        self._joins = self._pieces_join()
        self._control = _cuttable(ingredients.control_tokens, self._backend)

    def to_json(self) -> str:
        """Return what it is made of, all but its variables, which may be dates and the like."""
        parts = self._ingredients
        plain = {"backend": parts.backend.to_str(), "variables": None}
        return json.dumps({**vars(parts), **plain})

    @classmethod
    def from_json(cls, text: str | bytes, variables: Mapping[str, Any]) -> "ChatEncoder":
        """Make an encoder again, in a worker without transformers and, with it, torch."""
        parts = json.loads(text)
        made = {
            "backend": Tokenizer.from_str(parts["backend"]),
            "control_tokens": tuple(parts["control_tokens"]),
            "variables": variables,
        }
        encoder = cls.__new__(cls)
        encoder._set_up(_Ingredients(**{**parts, **made}))
        return encoder

    @property
    def variables(self) -> Mapping[str, Any]:
        """Values every rendering sees."""
        return self._ingredients.variables

    @property
    def name(self) -> str:
        """Folder or name of the tokenizer."""
        return self._ingredients.name

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens by which the template ends an answer."""
        ends = {*self._plain_finder.end_tokens, *self._tool_finder.end_tokens}
        ids = (self._backend.token_to_id(token) for token in ends)
        return tuple(token_id for token_id in ids if token_id is not None)

    @property
    def digest(self) -> str:
        """Digest of everything that the ids and the mask depend on."""
        templates = {f.template.digest: None for f in (self._plain_finder, self._tool_finder)}
        return content_digest(self._backend.to_str(), *templates, self._ingredients.control_tokens)

    def finder(self, tools: Sequence[Message] | None = None) -> TurnFinder:
        """Return what renders: of several named templates, `tool_use` where tools are given."""
        return self._tool_finder if tools else self._plain_finder

    def encode(
        self,
        messages: Sequence[Message],
        *,
        supervise: Supervise = "all_turns",
        tools: Sequence[Message] | None = None,
    ) -> EncodedChat:
        """Encode one conversation.

        Raises:
            DataError: It cannot be rendered or encoded; the message says why.
        """
        return self.encode_rendered([self.render(messages, tools=tools)], supervise=supervise)[0]

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Message] | None = None
    ) -> Rendering:
        """Render one conversation and find its answers; None contents count as empty."""
        cleaned = [_clean(message, k) for k, message in enumerate(messages)]
        rendering = self.finder(tools).render(cleaned, tools=tools)
        _check_characters(rendering.text)
        return rendering

    def encode_text(self, text: str) -> EncodedChat:
        """Encode plain text, all of it supervised but what the tokenizer adds by itself."""
        _check_characters(text)
        self._backend.encode_special_tokens = True
        try:
            encoding = self._backend.encode(text, add_special_tokens=True)
        finally:
            self._backend.encode_special_tokens = False
        added = np.array(encoding.special_tokens_mask, dtype=np.bool_)
        return EncodedChat(np.array(encoding.ids, dtype=np.int32), ~added)

    def encode_prompt(
        self, messages: Sequence[Message], *, tools: Sequence[Message] | None = None
    ) -> NDArray[np.int32]:
        """Encode what a server would be given: the messages and the generation prompt."""
        return self.encode_rendered([self._render_prompt(messages, tools)])[0].input_ids

    def prompt_text(
        self, messages: Sequence[Message], *, tools: Sequence[Message] | None = None
    ) -> str:
        """Return the text of what a server would be given."""
        return self._render_prompt(messages, tools).text

    def decode(self, input_ids: Sequence[int]) -> str:
        """Return the text of tokens, control tokens included."""
        return self._backend.decode(list(input_ids), skip_special_tokens=False)

    def _render_prompt(
        self, messages: Sequence[Message], tools: Sequence[Message] | None
    ) -> Rendering:
        cleaned = [_clean(message, k) for k, message in enumerate(messages)]
        prompt = self.finder(tools).render_prompt(cleaned, tools=tools)
        _check_characters(prompt.text)
        return prompt

    def encode_rendered(
        self, renderings: Sequence[Rendering], *, supervise: Supervise = "all_turns"
    ) -> list[EncodedChat]:
        """Tokenise rendered conversations together."""
        rows = [_pieces(rendering, supervise) for rendering in renderings]
        if not self._joins:
            return [self._encode_by_offsets(row) for row in rows]
        # What the template puts between contents recurs in each row and is tokenised once.
        rows = [self._cut(row) for row in rows]
        texts = list({piece.text: None for row in rows for piece in row if not piece.as_letters})
        encoded = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        known = {text: encoding.ids for text, encoding in zip(texts, encoded, strict=True)}
        ids = [
            self.text_ids(piece.text) if piece.as_letters else known[piece.text]
            for row in rows
            for piece in row
        ]
        return _rows_of(ids, rows)

    def _cut(self, row: Sequence[_Piece]) -> Sequence[_Piece]:
        """Cut prompts before their control tokens, where the tokenizer cuts them too."""
        if self._control is None:
            return row
        cut: list[_Piece] = []
        for piece in row:
            if piece.supervised or piece.as_letters:
                cut.append(piece)
            else:
                texts = self._control.split(piece.text)
                cut.extend(_Piece(text, False) for text in texts if text)
        return cut

    def text_ids(self, text: str) -> list[int]:
        """Encode text alone; the text of a control token stays ordinary text."""
        self._backend.encode_special_tokens = True
        try:
            return self._backend.encode(text, add_special_tokens=False).ids
        finally:
            self._backend.encode_special_tokens = False

    def _pieces_join(self) -> bool:
        """Say whether pieces may be tokenised alone; some tokenizers put a space before each."""

        def ids(text: str) -> list[int]:
            return self._backend.encode(text, add_special_tokens=False).ids

        return ids("a:") + ids(" b") == ids("a: b") and ids("a") + ids("(") == ids("a(")

    def _encode_by_offsets(self, row: Sequence[_Piece]) -> EncodedChat:
        text = "".join(piece.text for piece in row)
        if any(piece.as_letters for piece in row):
            raise DataError(
                "a message holds the text of a control token, which this tokenizer cannot keep as "
                "text; remove it from the message"
            )
        encoding = self._backend.encode(text, add_special_tokens=False)
        supervised = np.repeat(
            [piece.supervised for piece in row], [len(piece.text) for piece in row]
        )
        mask = np.array([bool(supervised[start:end].all()) for start, end in encoding.offsets])
        empty = np.array([start == end for start, end in encoding.offsets])
        return EncodedChat(np.array(encoding.ids, dtype=np.int32), mask & ~empty)


def _check_characters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"character {error.start} of the conversation is a lone surrogate (a byte or escape "
            "that is no UTF-8), which no tokenizer takes; mend the row's encoding"
        ) from None


def _clean(message: Message, number: int) -> dict[str, Any]:
    cleaned = {key: value for key, value in message.items() if value is not None}
    content = cleaned.setdefault("content", "")
    if not isinstance(content, str) or not isinstance(cleaned.get("role"), str):
        raise DataError(
            f"message {number} needs a role and a content of text, not role "
            f"{cleaned.get('role')!r} and a content of type {type(content).__name__}"
        )
    return cleaned


def _pieces(rendering: Rendering, supervise: Supervise) -> list[_Piece]:
    spans = rendering.spans if supervise == "all_turns" else rendering.spans[-1:]
    if not rendering.control_spans:
        return _plain_pieces(rendering.text, spans)
    letters = set(rendering.control_spans)
    cuts = sorted({0, len(rendering.text), *sum(spans, ()), *sum(rendering.control_spans, ())})
    starts = {start for start, end in spans if end > start}
    ends = {end for start, end in spans if end > start}
    pieces, supervised = [], False
    for start, end in pairwise(cuts):
        supervised = start in starts or (supervised and start not in ends)
        pieces.append(_Piece(rendering.text[start:end], supervised, (start, end) in letters))
    return pieces


def _plain_pieces(text: str, spans: Sequence[tuple[int, int]]) -> list[_Piece]:
    """Cut a text at its answers; most rows need no more."""
    pieces, position = [], 0
    for start, end in spans:
        if start > position:
            pieces.append(_Piece(text[position:start], False))
        if end > start:
            pieces.append(_Piece(text[start:end], True))
        position = end
    if position < len(text):
        pieces.append(_Piece(text[position:], False))
    return pieces


def _rows_of(ids: Sequence[list[int]], rows: Sequence[Sequence[_Piece]]) -> list[EncodedChat]:
    """Join the ids of all pieces and cut them into rows again."""
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    ends = np.concatenate([[0], np.cumsum(lengths)])
    joined = np.fromiter(chain.from_iterable(ids), np.int32, int(ends[-1]))
    mask = np.repeat([piece.supervised for row in rows for piece in row], lengths).astype(np.bool_)
    row_ends = ends[np.cumsum([0, *map(len, rows)])].tolist()
    return [EncodedChat(joined[a:b], mask[a:b]) for a, b in pairwise(row_ends)]


def _cuttable(control_tokens: Sequence[str], backend: Tokenizer) -> re.Pattern[str] | None:
    """Return where a control token starts; None where cutting there might change the tokens."""
    added = list(backend.get_added_tokens_decoder().values())
    heads = {token[:end] for token in control_tokens for end in range(1, len(token) + 1)}
    start = re.compile(f"(?={'|'.join(map(re.escape, control_tokens)) or '(?!)'})")
    for token in added:
        text = token.content
        if token.lstrip or token.single_word or start.search(text, 1):
            return None
        if any(text[k:] in heads for k in range(1, len(text))):
            return None
    return start


def _special_texts(tokenizer: "PreTrainedTokenizerBase") -> dict[str, str]:
    return {name: str(text) for name, text in tokenizer.special_tokens_map.items()}


def _control_tokens(tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    return [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
