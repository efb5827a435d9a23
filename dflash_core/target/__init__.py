"""The frozen large model: loading it and capturing its hidden features."""

from typing import TYPE_CHECKING

from dflash_core.target.config import TargetConfig
from dflash_core.target.layers import published_layer_ids, resolve_layer_ids

if TYPE_CHECKING:
    from dflash_core.target.loading import Target, load_target, target_digest

__all__ = [
    "Target",
    "TargetConfig",
    "load_target",
    "published_layer_ids",
    "resolve_layer_ids",
    "target_digest",
]


def __getattr__(name: str) -> object:
    # These import torch, which settings do not need.
    if name in {"Target", "load_target", "target_digest"}:
        from dflash_core.target import loading

        return getattr(loading, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
