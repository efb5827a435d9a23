"""Tokenizer folders, loaded as transformers does, without the network."""

from pathlib import Path
from typing import TYPE_CHECKING

from dflash_core.corpus.config import PrepareConfig
from dflash_core.corpus.masking import ChatEncoder
from dflash_core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["load_encoder", "load_tokenizer"]

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
    """Load a tokenizer folder as the encoder of a preparation.

    Raises:
        ConfigError: As `load_tokenizer`; or the tokenizer has no chat template.
    """
    return ChatEncoder(
        load_tokenizer(folder),
        chat_template=config.chat_template,
        template_variables=config.template_variables,
    )
