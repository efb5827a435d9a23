"""What drafters are evaluated on: prompts of a token store, or of chat files."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_core.artifacts import MANIFEST_NAME
from dflash_core.corpus.answers.regenerate import TurnPrompt
from dflash_core.corpus.config import PrepareConfig
from dflash_core.corpus.masking.encoder import ChatEncoder, EncodedChat
from dflash_core.corpus.masking.encoding import EncoderFacts, encoder_in, other_encoder
from dflash_core.corpus.masking.loading import encoder_of
from dflash_core.corpus.masking.spans import Message
from dflash_core.corpus.preparing.assemble import check_rejects
from dflash_core.corpus.reading.chats import Conversation
from dflash_core.corpus.reading.conversations import Intake, iter_made
from dflash_core.corpus.store import Sample, TokenStore
from dflash_core.decoding.regeneration import to_answer
from dflash_core.errors import DataError

__all__ = ["Prompt", "read_prompts", "store_prompts"]


@dataclass(frozen=True)
class Prompt:
    """A text to continue.

    Attributes:
        token_ids: Tokens of the prompt, shape ``(length,)``.
        domain: Where it came from; acceptance is reported by domain.
        encoder: What it was encoded with, where that is known.
        next_turn: Makes the prompt of the chat's next user turn out of the answer's tokens and
            those that end one; None at the last turn.
    """

    token_ids: NDArray[np.integer]
    domain: str = ""
    encoder: EncoderFacts | None = None
    next_turn: "Callable[[Sequence[int], Sequence[int]], Prompt] | None" = None


def read_prompts(
    path: Path,
    tokenizer: Any,
    corpus: PrepareConfig,
    *,
    max_prompts: int | None = None,
    drafter: Path | None = None,
    tell: Callable[[str], object] = lambda sentence: None,
) -> list[Prompt]:
    """Read prompts from a token store, or from chat files as `prepare` would take them.

    A chat ends where its store's sample is first supervised. One without answers is asked turn by
    turn, as `evaluate_drafter` does it; what is read is the prompt of the first turn.

    Args:
        path: A token store, a chat file, or a folder of chat files.
        tokenizer: The target's tokenizer, or the encoder made of it.
        corpus: How rows are read and encoded, and how many of them may be refused.
        max_prompts: Read no more than this.
        drafter: Folder of the drafter, whose manifest may name the encoder of its training.
        tell: Called with a sentence where rows are passed over, or that encoder is another one.

    Raises:
        DataError: There is nothing to read, nothing in it is a prompt, or more of its rows cannot
            be taken than ``corpus.max_reject_share``.
    """
    if not path.exists():
        raise DataError(f"there is no prompt file {path}; name a chat file or a token store")
    intake = Intake()
    if (path / MANIFEST_NAME).is_file():
        found = store_prompts(TokenStore.open(path), max_prompts=max_prompts)
    else:
        encoder = tokenizer if isinstance(tokenizer, ChatEncoder) else encoder_of(tokenizer, corpus)
        found = list(islice(_chat_prompts(path, encoder, corpus, intake), max_prompts))
    if not found:
        why = next(iter(intake.passed_over), "a chat needs a message before its answer")
        raise DataError(f"{path} holds no prompt: {why}")
    check_rejects(intake.rejects, intake.num_rows, corpus.max_reject_share)
    if intake.passed_over:
        first, count = intake.passed_over[0], len(intake.passed_over)
        tell(f"{count:,} of {intake.num_rows:,} rows are passed over, the first: {first}")
    if drafter is not None and (sentence := other_encoder(drafter, found[0].encoder)):
        tell(sentence)
    return found


def store_prompts(store: TokenStore, *, max_prompts: int | None = None) -> list[Prompt]:
    """Return the prompts of a token store: each sample's tokens before its first supervised one.

    Samples that begin with a supervised token, or hold none, have no prompt and are left out.
    """
    facts = encoder_in(store.path)
    found = ((_before_answer(sample), sample.domain) for sample in store)
    prompts = (Prompt(ids, domain, facts) for ids, domain in found if len(ids))
    return list(islice(prompts, max_prompts))


def _before_answer(sample: Sample | EncodedChat) -> NDArray[np.integer]:
    start = int(np.argmax(sample.loss_mask)) if sample.loss_mask.any() else 0
    return sample.input_ids[:start]


def _chat_prompts(
    path: Path, encoder: ChatEncoder, corpus: PrepareConfig, intake: Intake
) -> Iterator[Prompt]:
    facts = EncoderFacts.of(encoder)

    def prompt(item: Conversation) -> Prompt:
        if any(message["role"] == "assistant" for message in item.messages):
            tools = item.tools or None
            chat = encoder.encode(item.messages, tools=tools, supervise=corpus.supervise)
            return Prompt(_before_answer(chat), item.domain, facts)
        turn = first = _asked(encoder, facts, item, (), item.messages)
        while turn.next_turn:  # a later turn that the template refuses is the row's fault, too
            turn = turn.next_turn((), ())
        return first

    for made in iter_made([path], corpus, prompt, intake=intake):
        if len(made.token_ids):
            yield made


def _asked(
    encoder: ChatEncoder,
    facts: EncoderFacts,
    item: Conversation,
    said: Sequence[Message],
    coming: Sequence[Message],
) -> Prompt:
    """Return the prompt of a chat's next turn: to the first user message that another follows."""
    roles = pairwise(message["role"] for message in coming)
    end = next((k for k, pair in enumerate(roles, 1) if pair == ("user", "user")), len(coming))
    turn = TurnPrompt((*said, *coming[:end]), item.tools)

    def next_turn(text: Sequence[int], stops: Sequence[int]) -> Prompt:
        answer = to_answer(encoder, turn, text, stops).message
        return _asked(encoder, facts, item, (*turn.messages, answer), coming[end:])

    ids = encoder.encode_prompt(turn.messages, tools=turn.tools or None)
    return Prompt(ids, item.domain, facts, next_turn if coming[end:] else None)
