"""What drafters are evaluated on: prompts of a token store, or of chat files."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_core.artifacts import MANIFEST_NAME
from dflash_core.corpus.assemble import check_rejects
from dflash_core.corpus.chats import Conversation
from dflash_core.corpus.config import PrepareConfig
from dflash_core.corpus.conversations import Intake, iter_made
from dflash_core.corpus.encoding import EncoderFacts, encoder_in, other_encoder
from dflash_core.corpus.loading import encoder_of
from dflash_core.corpus.masking import ChatEncoder, EncodedChat
from dflash_core.corpus.store import Sample, TokenStore
from dflash_core.errors import DataError

__all__ = ["Prompt", "read_prompts", "store_prompts"]


@dataclass(frozen=True)
class Prompt:
    """A text to continue.

    Attributes:
        token_ids: Tokens of the prompt, shape ``(length,)``.
        domain: Where it came from; acceptance is reported by domain.
    """

    token_ids: NDArray[np.integer]
    domain: str = ""


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

    A chat ends where its store's sample is first supervised; one without answer at its end.

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
        facts = encoder_in(path)
        found = store_prompts(TokenStore.open(path), max_prompts=max_prompts)
    else:
        encoder = tokenizer if isinstance(tokenizer, ChatEncoder) else encoder_of(tokenizer, corpus)
        facts = EncoderFacts.of(encoder)
        found = list(islice(_chat_prompts(path, encoder, corpus, intake), max_prompts))
    if not found:
        why = next(iter(intake.passed_over), "a chat needs a message before its answer")
        raise DataError(f"{path} holds no prompt: {why}")
    check_rejects(intake.rejects, intake.num_rows, corpus.max_reject_share)
    if intake.passed_over:
        first, count = intake.passed_over[0], len(intake.passed_over)
        tell(f"{count:,} of {intake.num_rows:,} rows are passed over, the first: {first}")
    if drafter is not None and (sentence := other_encoder(drafter, facts)):
        tell(sentence)
    return found


def store_prompts(store: TokenStore, *, max_prompts: int | None = None) -> list[Prompt]:
    """Return the prompts of a token store: each sample's tokens before its first supervised one.

    Samples that begin with a supervised token, or hold none, have no prompt and are left out.
    """
    found = ((_before_answer(sample), sample.domain) for sample in store)
    prompts = (Prompt(ids, domain) for ids, domain in found if len(ids))
    return list(islice(prompts, max_prompts))


def _before_answer(sample: Sample | EncodedChat) -> NDArray[np.integer]:
    start = int(np.argmax(sample.loss_mask)) if sample.loss_mask.any() else 0
    return sample.input_ids[:start]


def _chat_prompts(
    path: Path, encoder: ChatEncoder, corpus: PrepareConfig, intake: Intake
) -> Iterator[Prompt]:
    def prompt(item: Conversation) -> Prompt:
        tools = item.tools or None
        if any(message["role"] == "assistant" for message in item.messages):
            chat = encoder.encode(item.messages, tools=tools, supervise=corpus.supervise)
            return Prompt(_before_answer(chat), item.domain)
        return Prompt(encoder.encode_prompt(item.messages, tools=tools), item.domain)

    for made in iter_made([path], corpus, prompt, intake=intake):
        if len(made.token_ids):
            yield made
