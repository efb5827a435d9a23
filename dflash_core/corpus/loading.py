"""Tokenizer folders, loaded as transformers does, without the network; encoders out of them."""

from pathlib import Path
from typing import TYPE_CHECKING

from dflash_core.corpus.config import PrepareConfig
from dflash_core.corpus.masking import ChatEncoder
from dflash_core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["encoder_of", "load_encoder", "load_tokenizer"]

PROBE = "a"


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """Load a tokenizer folder.

    Raises:
        ConfigError: The folder does not exist or holds no tokenizer.
    """
    # Imports torch wherever that is installed, which takes seconds: not before it is needed.
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise ConfigError(f"there is no tokenizer folder {folder}; give one with --tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
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


def load_encoder(folder: Path, config: PrepareConfig) -> ChatEncoder:
    """Load a tokenizer folder as the encoder of a corpus.

    Raises:
        ConfigError: As `load_tokenizer` and `encoder_of`.
    """
    return encoder_of(load_tokenizer(folder), config)


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
