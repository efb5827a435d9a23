"""Is it any good? Plain and speculative decoding, acceptance length."""

import importlib
from typing import TYPE_CHECKING

from dflash_core.decoding.config import EvaluationConfig, Sampling
from dflash_core.decoding.report import AcceptanceGroup, AcceptanceReport, Exactness, Speed

if TYPE_CHECKING:
    from dflash_core.decoding.acceptance import evaluate_drafter
    from dflash_core.decoding.comparison import Gain, compare_drafters
    from dflash_core.decoding.plain import generate, stop_tokens
    from dflash_core.decoding.prompts import Prompt, read_prompts, store_prompts
    from dflash_core.decoding.speculative import Generation, speculative_generate

__all__ = [
    "AcceptanceGroup",
    "AcceptanceReport",
    "EvaluationConfig",
    "Exactness",
    "Gain",
    "Generation",
    "Prompt",
    "Sampling",
    "Speed",
    "compare_drafters",
    "evaluate_drafter",
    "generate",
    "read_prompts",
    "speculative_generate",
    "stop_tokens",
    "store_prompts",
]

# These import torch, which settings do not need.
_LAZY = {
    "Generation": "speculative",
    "Prompt": "prompts",
    "Gain": "comparison",
    "compare_drafters": "comparison",
    "evaluate_drafter": "acceptance",
    "generate": "plain",
    "read_prompts": "prompts",
    "speculative_generate": "speculative",
    "stop_tokens": "plain",
    "store_prompts": "prompts",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
