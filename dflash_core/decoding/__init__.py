"""Is it any good? Plain and speculative decoding, acceptance length."""

import importlib
from typing import TYPE_CHECKING

from dflash_core.decoding.config import EvaluationConfig, Sampling

if TYPE_CHECKING:
    from dflash_core.decoding.acceptance import (
        AcceptanceGroup,
        AcceptanceReport,
        Exactness,
        evaluate_drafter,
    )
    from dflash_core.decoding.comparison import AcceptanceGain, compare_acceptance
    from dflash_core.decoding.plain import generate, stop_tokens
    from dflash_core.decoding.prompts import Prompt, read_prompts, store_prompts
    from dflash_core.decoding.speculative import Generation, speculative_generate

__all__ = [
    "AcceptanceGain",
    "AcceptanceGroup",
    "AcceptanceReport",
    "EvaluationConfig",
    "Exactness",
    "Generation",
    "Prompt",
    "Sampling",
    "compare_acceptance",
    "evaluate_drafter",
    "generate",
    "read_prompts",
    "speculative_generate",
    "stop_tokens",
    "store_prompts",
]

# These import torch, which settings do not need.
_LAZY = {
    "AcceptanceGain": "comparison",
    "AcceptanceGroup": "acceptance",
    "AcceptanceReport": "acceptance",
    "Exactness": "acceptance",
    "Generation": "speculative",
    "Prompt": "prompts",
    "compare_acceptance": "comparison",
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
