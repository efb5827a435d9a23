"""Settings of the drafter and its loss."""

from typing import Literal

from pydantic import Field

from dflash_core.config import FrozenModel

__all__ = ["DraftConfig", "LossConfig"]


class DraftConfig(FrozenModel):
    """Shape of the drafter; widths that are not given are the target's."""

    num_layers: int = Field(default=5, ge=1)
    """Decoder layers of the drafter."""
    block_size: int = Field(default=16, ge=2)
    """Positions drafted in one pass, the anchor slot included."""
    intermediate_size: int | None = Field(default=None, ge=1)
    """Width of the MLP; the target's when not given."""
    num_attention_heads: int | None = Field(default=None, ge=1)
    """Query heads; the target's when not given."""
    num_key_value_heads: int | None = Field(default=None, ge=1)
    """Key and value heads; the target's when not given."""
    head_dim: int | None = Field(default=None, ge=2)
    """Width of a head; the target's when not given."""
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    """Attention of each layer; all full when not given."""
    sliding_window: int | None = Field(default=None, ge=1)
    """Context tokens that a sliding layer sees."""
    mask_token_id: int | None = Field(default=None, ge=0)
    """Reserved row of the target's embedding for the slots to draft; found when not given."""
    is_causal: bool | None = None
    """In-block causality; sliding layers causal and full ones not when not given, as served."""
    initial_weights: Literal["random", "target"] = "random"
    """Drawn from the seed as published, or copies of the target's own layers (a faster start)."""
    draft_vocab_size: int | None = Field(default=None, ge=2)
    """Most frequent tokens that the drafter can propose; all when not given."""


class LossConfig(FrozenModel):
    """What the drafter is trained on."""

    kind: Literal["decayed_ce", "dpace", "forward_kl"] = "decayed_ce"
    """Decayed cross-entropy as published, D-PACE weights, or distillation from the target."""
    gamma: float | None = Field(default=None, gt=0)
    """Decay length of slot weights; by block size when not given (16: 7, 10: 5, 8: 4)."""
    dpace_alpha: float = Field(default=0.5, ge=0, le=1)
    """Smoothing of D-PACE."""
    attention: Literal["sliced", "flex"] = "sliced"
    """Attention in training: SDPA over slices of like context, or FlexAttention (for GPUs)."""
    chunk_anchors: int = Field(default=32, ge=1)
    """Anchors whose logits are in memory at the same time."""

    @property
    def distils(self) -> bool:
        """Whether the target's final hidden state is one more feature of every token."""
        return self.kind == "forward_kl"
