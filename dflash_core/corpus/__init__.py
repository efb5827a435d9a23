"""What do the samples say? Chats become token ids and a loss mask in a memory-mapped store."""

import importlib
from typing import TYPE_CHECKING

from dflash_core.corpus.config import (
    CorpusConfig,
    EndpointConfig,
    PrepareConfig,
    RegenerateConfig,
)
from dflash_core.corpus.store import Sample, TokenStore, write_store

if TYPE_CHECKING:
    from dflash_core.corpus.assemble import PrepareReport, Selection, find_leaks
    from dflash_core.corpus.chats import Conversation, convert_row, detect_format
    from dflash_core.corpus.conversations import iter_conversations
    from dflash_core.corpus.endpoint import endpoint_generate
    from dflash_core.corpus.loading import encode_chat, load_encoder
    from dflash_core.corpus.masking import ChatEncoder
    from dflash_core.corpus.prepare import prepare_corpus, prepare_store
    from dflash_core.corpus.regenerate import RegenerateReport, regenerate_chats

__all__ = [
    "ChatEncoder",
    "Conversation",
    "CorpusConfig",
    "EndpointConfig",
    "PrepareConfig",
    "PrepareReport",
    "RegenerateConfig",
    "RegenerateReport",
    "Sample",
    "Selection",
    "TokenStore",
    "convert_row",
    "detect_format",
    "encode_chat",
    "endpoint_generate",
    "find_leaks",
    "iter_conversations",
    "load_encoder",
    "prepare_corpus",
    "prepare_store",
    "regenerate_chats",
    "write_store",
]

# Tokenizers and templates, which readers of stores do not need.
_LAZY = {
    "ChatEncoder": "masking",
    "Conversation": "chats",
    "PrepareReport": "assemble",
    "RegenerateReport": "regenerate",
    "Selection": "assemble",
    "convert_row": "chats",
    "detect_format": "chats",
    "encode_chat": "loading",
    "endpoint_generate": "endpoint",
    "find_leaks": "assemble",
    "iter_conversations": "conversations",
    "load_encoder": "loading",
    "prepare_corpus": "prepare",
    "prepare_store": "prepare",
    "regenerate_chats": "regenerate",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
