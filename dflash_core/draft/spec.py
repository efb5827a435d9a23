"""The resolved shape of a drafter: everything its checkpoint's ``config.json`` must say."""

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash_core.config import FrozenModel
from dflash_core.target.layers import resolve_layer_ids

__all__ = ["DraftSpec", "LayerType"]

LayerType = Literal["full_attention", "sliding_attention"]


class DraftSpec(FrozenModel):
    """A drafter without its weights: widths, attention, RoPE, and its contract with the target."""

    hidden_size: int = Field(ge=1)
    """Width, the target's."""
    num_layers: int = Field(ge=1)
    """Decoder layers of the drafter."""
    block_size: int = Field(ge=2)
    """Positions drafted in one pass, the anchor slot included."""
    intermediate_size: int = Field(ge=1)
    """Width of the MLP."""
    num_attention_heads: int = Field(ge=1)
    """Query heads."""
    num_key_value_heads: int = Field(ge=1)
    """Key and value heads."""
    head_dim: int = Field(ge=2)
    """Width of a head."""
    vocab_size: int = Field(ge=2)
    """Rows of the target's embedding and head."""
    mask_token_id: int = Field(ge=0)
    """Embedding row that stands in every slot to draft."""
    target_layer_ids: tuple[int, ...] = Field(min_length=1)
    """Target decoder layers whose outputs are the context features, in order."""
    num_target_layers: int = Field(ge=1)
    """Decoder layers of the target."""
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    """Epsilon of every norm."""
    rope_parameters: dict[str, Any]
    """RoPE as the target has it, in the schema of transformers 5."""
    max_position_embeddings: int = Field(default=32_768, ge=1)
    """Longest position that RoPE was made for."""
    layer_types: tuple[LayerType, ...]
    """Attention of each layer."""
    sliding_window: int | None = Field(default=None, ge=1)
    """Tokens back that a sliding layer sees, the own position counted."""
    is_causal: bool | None = Field(default=None, validate_default=True)
    """In-block causality of every layer; None where sliding layers are causal and full ones not."""
    attention_bias: bool = False
    """Biases in the attention projections."""
    input_embedding_scale: float = Field(default=1.0, gt=0)
    """Factor on the raw embedding rows (Gemma: the square root of the width)."""
    output_multiplier: float = Field(default=1.0, gt=0)
    """Factor on the head's output."""
    final_logit_softcapping: float | None = Field(default=None, gt=0)
    """Bound of tanh-capped logits."""
    draft_vocab_size: int | None = Field(default=None, ge=2)
    """Tokens that can be proposed; all when unset."""

    @field_validator("is_causal")
    @classmethod
    def _is_said_where_layers_agree(cls, causal: bool | None, info: ValidationInfo) -> bool | None:
        kinds = set(info.data.get("layer_types", ()))
        return kinds == {"sliding_attention"} if causal is None and len(kinds) == 1 else causal

    @model_validator(mode="after")
    def _check_shapes(self) -> "DraftSpec":
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}; set draft.num_key_value_heads"
            )
        if len(self.layer_types) != self.num_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers but num_layers is "
                f"{self.num_layers}; set draft.layer_types"
            )
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError("a sliding layer needs a width; set draft.sliding_window")
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is outside the vocabulary of "
                f"{self.vocab_size}; set draft.mask_token_id"
            )
        resolve_layer_ids(self.num_target_layers, 0, self.target_layer_ids)
        rope = self.rope_parameters.get("rope_type", "default")
        if rope != "default" and rope not in ROPE_INIT_FUNCTIONS:
            raise ValueError(
                f"rope_type '{rope}' is none of default, {', '.join(sorted(ROPE_INIT_FUNCTIONS))}; "
                "set it to the target's"
            )
        if self.draft_vocab_size is not None and self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} is over the vocabulary of "
                f"{self.vocab_size}; lower draft.draft_vocab_size"
            )
        return self

    @property
    def feature_size(self) -> int:
        """Width of the context features: captured layers times hidden size."""
        return len(self.target_layer_ids) * self.hidden_size

    def causal(self, layer: int) -> bool:
        """Whether a slot of this layer sees only itself and earlier slots of its block."""
        if self.is_causal is not None:
            return self.is_causal
        return self.layer_types[layer] == "sliding_attention"

    def window(self, layer: int) -> int | None:
        """Tokens back that this layer sees, or None for all."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def to_qwen3(self) -> Qwen3Config:
        """Return the transformers config that served drafters carry."""
        return Qwen3Config(
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_layers,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            rms_norm_eps=self.rms_norm_eps,
            rope_parameters=dict(self.rope_parameters),  # pyright: ignore[reportArgumentType]
            max_position_embeddings=self.max_position_embeddings,
            attention_bias=self.attention_bias,
            layer_types=list(self.layer_types),
            use_sliding_window="sliding_attention" in self.layer_types,
            sliding_window=self.sliding_window,
            tie_word_embeddings=False,
        )
