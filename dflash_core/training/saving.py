"""Write a trained target as a transformers folder, whole or not at all."""

import copy
from pathlib import Path
from typing import Any

import torch

from dflash_core.target.folder import write_folder

__all__ = ["TARGET_KIND", "save_target"]

TARGET_KIND = "target"
TARGET_VERSION = 1


def save_target(model: Any, tokenizer: Any, out: Path, facts: dict[str, Any]) -> Path:
    """Save model and tokenizer for transformers, in bfloat16 safetensors.

    Args:
        model: A transformers model; it is left as it is.
        tokenizer: Its tokenizer.
        out: Folder.
        facts: JSON-able facts for the manifest.
    """
    stored = copy.deepcopy(model).to(torch.bfloat16)
    stored.config.dtype = torch.bfloat16
    return write_folder(
        stored, tokenizer, out, kind=TARGET_KIND, format_version=TARGET_VERSION, facts=facts
    )
