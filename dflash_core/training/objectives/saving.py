"""Write a trained target as a transformers folder, whole or not at all."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_core.target.folder import write_folder

__all__ = ["TARGET_KIND", "save_target"]

TARGET_KIND = "target"
TARGET_VERSION = 1


def save_target(
    model: Any, tokenizer: Any, weights: dict[str, Tensor], out: Path, facts: dict[str, Any]
) -> Path:
    """Save model and tokenizer for transformers: bfloat16 parameters, buffers as they are.

    Args:
        model: A transformers model, of which only the shape is read.
        tokenizer: Its tokenizer.
        weights: Its state, whole.
        out: Folder.
        facts: JSON-able facts for the manifest.
    """
    with torch.device("meta"):
        stored = type(model)(copy.deepcopy(model.config))
    # A buffer is a table, a counter or a router's bias: rounded, some say something else.
    buffers = dict(stored.named_buffers())
    rounded = {
        name: tensor.to("cpu", None if name in buffers else torch.bfloat16)
        for name, tensor in weights.items()
    }
    stored.load_state_dict(rounded, assign=True)
    stored.tie_weights()
    stored.generation_config = copy.deepcopy(model.generation_config)
    stored.config.dtype = torch.bfloat16
    return write_folder(
        stored, tokenizer, out, kind=TARGET_KIND, format_version=TARGET_VERSION, facts=facts
    )
