"""What drafters are evaluated on: prompts of a token store, or of chat files."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_core.artifacts import MANIFEST_NAME
from dflash_core.corpus.config import PrepareConfig
from dflash_core.corpus.conversations import Intake, iter_conversations
from dflash_core.corpus.masking import ChatEncoder
from dflash_core.corpus.store import TokenStore
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


def read_prompts(path: Path, tokenizer: Any, *, max_prompts: int | None = None) -> list[Prompt]:
    """Read prompts from a token store, or from chat files of any format that `prepare` takes.

    A chat ends before its last assistant message, if it has one.

    Args:
        path: A token store, a chat file, or a folder of chat files.
        tokenizer: The target's tokenizer, whose chat template renders the prompts.
        max_prompts: Read no more than this.

    Raises:
        DataError: There is nothing to read, or nothing in it is a prompt.
    """
    if not path.exists():
        raise DataError(f"there is no prompt file {path}; name a chat file or a token store")
    intake = Intake()
    if (path / MANIFEST_NAME).is_file():
        found = store_prompts(TokenStore.open(path), max_prompts=max_prompts)
    else:
        found = list(islice(_chat_prompts(path, tokenizer, intake), max_prompts))
    if not found:
        why = next(iter(intake.passed_over), "a chat needs a message before its answer")
        raise DataError(f"{path} holds no prompt: {why}")
    return found


def store_prompts(store: TokenStore, *, max_prompts: int | None = None) -> list[Prompt]:
    """Return the prompts of a token store: each sample's tokens before its first supervised one.

    Samples that begin with a supervised token, or hold none, have no prompt and are left out.
    """
    found = []
    for sample in store:
        if max_prompts is not None and len(found) >= max_prompts:
            break
        start = int(np.argmax(sample.loss_mask)) if sample.loss_mask.any() else 0
        if start > 0:
            found.append(Prompt(sample.input_ids[:start], sample.domain))
    return found


def _chat_prompts(path: Path, tokenizer: Any, intake: Intake) -> Iterator[Prompt]:
    encoder = ChatEncoder(tokenizer)
    for conversation in iter_conversations([path], PrepareConfig(), intake=intake):
        messages = list(conversation.messages)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        messages = messages[: answers[-1]] if answers else messages
        if messages:
            ids = encoder.encode_prompt(messages, tools=conversation.tools or None)
            yield Prompt(np.asarray(ids, dtype=np.int64), conversation.domain)
