"""The drafter: a few Qwen3-style layers whose keys and values begin with the target's features.

The context never passes through the layers. Each layer projects the fused features once to keys
and values; only block slots have queries, an output projection and an MLP. How queries meet keys
is an argument (`Attend`): sliced SDPA or FlexAttention in training, a KV cache in decoding.

Parameters carry the names of the published checkpoints. Embedding and head are the target's,
passed in from outside: they are never part of the state dict, never trained, never saved.

Legend: N anchors (blocks), K block size, M context tokens, D width, F features, H heads, E head.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash_core.draft.spec import DraftSpec
from dflash_core.target.families import capped
from dflash_core.target.rope import freeze_rope

__all__ = ["Attend", "DraftModel", "KeyValue"]

KeyValue = tuple[Tensor, Tensor]


class Attend(Protocol):
    """Attention of block slots over their context and their own block."""

    def __call__(self, query_NKHE: Tensor, own: KeyValue, context: KeyValue, layer: int) -> Tensor:
        """Return the attended values, shape (N, K, H, E), for keys (N, K, Hkv, E) and context."""
        ...


class DraftModel(nn.Module):
    """A DFlash drafter without embedding and head."""

    draft_token_ids: Tensor | None

    def __init__(self, spec: DraftSpec, draft_token_ids: Tensor | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.fc = nn.Linear(spec.feature_size, spec.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(spec, index) for index in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(spec.to_qwen3())
        self.register_buffer("draft_token_ids", draft_token_ids, persistent=False)

    def context(self, features_MF: Tensor, positions_M: Tensor) -> list[KeyValue]:
        """Return each layer's keys and values of context tokens, shape (M, Hkv, E) each.

        Args:
            features_MF: Captured target features, one row a token.
            positions_M: Position of each token in its document.
        """
        context_MD = self.hidden_norm(self.fc(features_MF))
        rotary = self._rotary(context_MD, positions_M)
        return [layer.context(context_MD, rotary) for layer in self._layers]

    def forward(
        self,
        noise_NKD: Tensor,
        positions_NK: Tensor,
        context: list[KeyValue],
        attend: Attend,
    ) -> Tensor:
        """Return the slots' final hidden states, shape (N, K, D), which the target's head reads.

        Args:
            noise_NKD: Embedded block: the anchor token, then mask tokens.
            positions_NK: Position of each slot in its document.
            context: Result of `context`, or what a cache made of it.
            attend: How queries meet keys.
        """
        hidden_NKD = noise_NKD
        rotary = self._rotary(noise_NKD, positions_NK)
        for layer, key_value in zip(self._layers, context, strict=True):
            hidden_NKD = layer(hidden_NKD, rotary, key_value, attend)
        return self.norm(hidden_NKD)

    def noise(
        self, anchor_ids_N: Tensor, embedding_VD: Tensor, *, width: int | None = None
    ) -> Tensor:
        """Return embedded blocks, shape (N, K, D): the anchor token, then mask tokens.

        Args:
            anchor_ids_N: Token of each anchor.
            embedding_VD: The target's embedding rows.
            width: Slots; the block size when not given, fewer at the end of a text.
        """
        spec = self.spec
        shape = (len(anchor_ids_N), width or spec.block_size)
        ids_NK = anchor_ids_N.new_full(shape, spec.mask_token_id)
        ids_NK[:, 0] = anchor_ids_N
        rows_NKD = F.embedding(ids_NK, embedding_VD).to(self.fc.weight.dtype)
        return rows_NKD * spec.input_embedding_scale

    def head_weight(self, head_VD: Tensor) -> Tensor:
        """Return the rows of the target's head that this drafter can propose."""
        return head_VD if self.draft_token_ids is None else head_VD[self.draft_token_ids]

    def scale_logits(self, logits: Tensor) -> Tensor:
        """Apply the target's multiplier and soft cap to the head's output."""
        return capped(logits, self.spec.output_multiplier, self.spec.final_logit_softcapping)

    @property
    def _layers(self) -> "list[DraftLayer]":
        return list(self.layers)  # pyright: ignore[reportReturnType]

    def _rotary(self, like: Tensor, positions: Tensor) -> KeyValue:
        cos, sin = self.rotary_emb(like, positions.reshape(1, -1))
        shape = (*positions.shape, 1, self.spec.head_dim)
        return cos.view(shape), sin.view(shape)


class RotaryEmbedding(Qwen3RotaryEmbedding):
    """RoPE whose frequencies stay: the same for every call, and in float32 in a model that is cast.

    Rounded to bfloat16 they are off by 0.4%: whole turns at positions of some thousand.
    """

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        freeze_rope(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RotaryEmbedding":
        def move_only(buffer: Tensor) -> Tensor:
            moved = fn(buffer)
            return moved if moved.dtype == buffer.dtype else buffer.to(moved.device)

        return super()._apply(move_only, recurse)


class RMSNorm(nn.RMSNorm):
    """Root mean square norm in the precision of its weight, whatever autocast hands it."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed input in the input's precision."""
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class DraftLayer(nn.Module):
    """One decoder layer; context rows enter only as keys and values."""

    def __init__(self, spec: DraftSpec, index: int) -> None:
        super().__init__()
        self.self_attn = DraftAttention(spec, index)
        self.mlp = DraftMLP(spec)
        self.input_layernorm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)

    def context(self, context_MD: Tensor, rotary: KeyValue) -> KeyValue:
        """Return keys and values of context tokens, shape (M, Hkv, E) each."""
        return self.self_attn.key_value(context_MD, rotary)

    def forward(
        self, hidden_NKD: Tensor, rotary: KeyValue, context: KeyValue, attend: Attend
    ) -> Tensor:
        """Return the layer's output, shape (N, K, D)."""
        normed_NKD = self.input_layernorm(hidden_NKD)
        hidden_NKD = hidden_NKD + self.self_attn(normed_NKD, rotary, context, attend)
        return hidden_NKD + self.mlp(self.post_attention_layernorm(hidden_NKD))


class DraftAttention(nn.Module):
    """Grouped-query attention with normed queries and keys."""

    def __init__(self, spec: DraftSpec, index: int) -> None:
        super().__init__()
        self.index = index
        self.head_dim = spec.head_dim
        width, bias = spec.hidden_size, spec.attention_bias
        queries = spec.num_attention_heads * spec.head_dim
        keys = spec.num_key_value_heads * spec.head_dim
        self.q_proj = nn.Linear(width, queries, bias=bias)
        self.k_proj = nn.Linear(width, keys, bias=bias)
        self.v_proj = nn.Linear(width, keys, bias=bias)
        self.o_proj = nn.Linear(queries, width, bias=bias)
        self.q_norm = RMSNorm(spec.head_dim, eps=spec.rms_norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, eps=spec.rms_norm_eps)

    def key_value(self, hidden: Tensor, rotary: KeyValue) -> KeyValue:
        """Return rotated keys and values, shape (..., Hkv, E) each."""
        key = self.k_norm(self._heads(self.k_proj(hidden)))
        return _rotate(key, rotary), self._heads(self.v_proj(hidden))

    def forward(
        self, hidden_NKD: Tensor, rotary: KeyValue, context: KeyValue, attend: Attend
    ) -> Tensor:
        """Return the attention output, shape (N, K, D)."""
        query_NKHE = _rotate(self.q_norm(self._heads(self.q_proj(hidden_NKD))), rotary)
        own = self.key_value(hidden_NKD, rotary)
        return self.o_proj(attend(query_NKHE, own, context, self.index).flatten(-2))

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim))


class DraftMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the MLP's output, same shape."""
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


def _rotate(heads: Tensor, rotary: KeyValue) -> Tensor:
    cos, sin = rotary
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin
