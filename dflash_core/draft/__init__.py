"""The DFlash drafter: anchors, mask, model and loss."""

import importlib
from typing import TYPE_CHECKING

from dflash_core.draft.anchors import eligible_anchors, sample_anchors
from dflash_core.draft.config import DraftConfig, LossConfig

if TYPE_CHECKING:
    from dflash_core.draft.attention import SlicedAttention
    from dflash_core.draft.batch import DraftBatch, collate
    from dflash_core.draft.build import build_drafter, draft_spec, frequent_tokens
    from dflash_core.draft.loss import DraftLoss, draft_hidden, draft_loss
    from dflash_core.draft.model import DraftModel
    from dflash_core.draft.spec import DraftSpec

__all__ = [
    "DraftBatch",
    "DraftConfig",
    "DraftLoss",
    "DraftModel",
    "DraftSpec",
    "LossConfig",
    "SlicedAttention",
    "build_drafter",
    "collate",
    "draft_hidden",
    "draft_loss",
    "draft_spec",
    "eligible_anchors",
    "frequent_tokens",
    "sample_anchors",
]

# These import torch, which settings and anchors do not need.
_LAZY = {
    "DraftBatch": "batch",
    "DraftLoss": "loss",
    "DraftModel": "model",
    "DraftSpec": "spec",
    "SlicedAttention": "attention",
    "build_drafter": "build",
    "collate": "batch",
    "draft_hidden": "loss",
    "draft_loss": "loss",
    "draft_spec": "build",
    "frequent_tokens": "build",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
