"""Tokenizer folders, loaded as transformers does, without the network; encoders out of them."""

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dflash_core.corpus.config import PrepareConfig
from dflash_core.corpus.masking.encoder import ChatEncoder, Supervise
from dflash_core.corpus.masking.spans import Message
from dflash_core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["encode_chat", "encoder_of", "load_encoder", "load_tokenizer", "own_encoder"]

PROBE = "a"


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    """Load a tokenizer folder.

    Args:
        folder: A transformers folder.
        trust_remote_code: Whether Python code that comes with it may run.

    Raises:
        ConfigError: The folder does not exist or holds no tokenizer.
    """
    # Imports torch wherever that is installed, which takes seconds: not before it is needed.
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise ConfigError(f"there is no tokenizer folder {folder}; give one with --tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{folder} holds no usable tokenizer: {reason}") from None
    # Without its vocabulary transformers makes an empty one, and all text would vanish.
    if not tokenizer.encode(PROBE, add_special_tokens=False):
        raise ConfigError(
            f"the tokenizer in {folder} has no token for '{PROBE}', its vocabulary is "
            f"{tokenizer.vocab_size:,} long; put the model's tokenizer.json, unpacked, beside its "
            "tokenizer_config.json"
        )
    return tokenizer


def load_encoder(
    folder: Path, config: PrepareConfig, *, trust_remote_code: bool = False
) -> ChatEncoder:
    """Load a tokenizer folder as the encoder of a corpus; see `load_tokenizer`.

    Raises:
        ConfigError: As `load_tokenizer` and `encoder_of`.
    """
    return encoder_of(load_tokenizer(folder, trust_remote_code=trust_remote_code), config)


def encoder_of(tokenizer: "PreTrainedTokenizerBase", config: PrepareConfig) -> ChatEncoder:
    """Return the one encoder of a corpus: for its stores, answers made anew and prompts alike.

    Raises:
        ConfigError: The template file cannot be read, or the tokenizer has no chat template.
    """
    template = config.chat_template
    try:
        source = None if template is None else template.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the template file {template} is not UTF-8: byte {error.object[error.start]:#04x} at "
            f"{error.start}; convert it"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"the template file {template} cannot be read: {error.strerror}; mend "
            "corpus.chat_template"
        ) from None
    return ChatEncoder(
        tokenizer, chat_template=source, template_variables=config.template_variables
    )


_ENCODERS: "weakref.WeakKeyDictionary[PreTrainedTokenizerBase, ChatEncoder]" = (
    weakref.WeakKeyDictionary()
)


def encode_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    *,
    supervise: Supervise = "all_turns",
    tools: Sequence[Message] | None = None,
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Return token ids and loss mask of a conversation under the tokenizer's own chat template.

    Args:
        tokenizer: A fast tokenizer with a chat template.
        messages: OpenAI messages: role, content, and for assistants reasoning_content, tool_calls
            and weight, which is 0 where an answer carries no loss.
        supervise: Whether every assistant turn carries loss or only the last.
        tools: JSON schemas of the tools on offer.

    Returns:
        Ids, int32, and mask, bool, both of shape ``(length,)``. Supervised tokens decode to each
        answer's text and its end-of-turn token.

    Raises:
        ConfigError: The tokenizer has no chat template or is not a fast one.
        DataError: The conversation cannot be rendered, or the template drops a part of it.
    """
    encoded = own_encoder(tokenizer).encode(messages, supervise=supervise, tools=tools)
    return encoded.input_ids, encoded.loss_mask


def own_encoder(tokenizer: "PreTrainedTokenizerBase") -> ChatEncoder:
    """Return the encoder of a tokenizer with its own template, made once.

    Raises:
        ConfigError: The tokenizer has no chat template or is not a fast one.
    """
    encoder = _ENCODERS.get(tokenizer)
    if encoder is None:
        encoder = _ENCODERS[tokenizer] = ChatEncoder(tokenizer)
    return encoder
