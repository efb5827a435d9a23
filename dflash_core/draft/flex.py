"""The mask for FlexAttention: one kernel call a layer, whole tiles of unseen keys skipped.

The same definition as in `dflash_core.draft.attention`, as a function of indices. On a GPU the
kernel is compiled; on a CPU the plain form runs, which tests compare with the sliced one.

Legend: M context tokens, N anchors, K block size, H heads, E head.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dflash_core.draft.attention import visible_block, visible_context
from dflash_core.draft.batch import DraftBatch
from dflash_core.draft.model import KeyValue
from dflash_core.draft.spec import DraftSpec

__all__ = ["FlexAttention"]


class FlexAttention:
    """Training attention by FlexAttention; made once per micro-batch and shared by all layers."""

    def __init__(self, batch: DraftBatch, spec: DraftSpec) -> None:
        self.spec = spec
        self.batch = batch
        self._masks: dict[tuple[bool, int | None], BlockMask] = {}

    def __call__(self, query_NKHE: Tensor, own: KeyValue, context: KeyValue, layer: int) -> Tensor:
        """Return the attended values, shape (N, K, H, E)."""
        key, value = (
            torch.cat([c, o.flatten(0, 1)]).transpose(0, 1)[None]
            for c, o in zip(context, own, strict=True)
        )
        # Under autocast the norms leave queries and keys wider than values.
        key, query = key.to(value.dtype), query_NKHE.to(value.dtype)
        query = query.flatten(0, 1).transpose(0, 1)[None]
        kernel = _compiled() if query.is_cuda else flex_attention
        out = kernel(query, key, value, block_mask=self._layer_mask(layer), enable_gqa=True)
        return out[0].transpose(0, 1).unflatten(0, query_NKHE.shape[:2])

    def _layer_mask(self, layer: int) -> BlockMask:
        key = (self.spec.causal(layer), self.spec.window(layer))
        if key not in self._masks:
            self._masks[key] = self._block_mask(*key)
        return self._masks[key]

    def _block_mask(self, causal: bool, window: int | None) -> BlockMask:
        batch, size = self.batch, self.spec.block_size
        anchors_N, documents_N = batch.anchor_positions_N, batch.anchor_documents_N
        positions_M = batch.context_positions_M
        documents_M = batch.document_ids_BT.flatten()[batch.context_index_M]
        num_context = len(positions_M)

        def seen(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            block, slot = q // size, q % size
            token = kv.clamp(max=num_context - 1)
            context = visible_context(
                anchors_N[block] + slot, anchors_N[block], positions_M[token], window
            ) & (documents_N[block] == documents_M[token])
            place = kv - num_context
            own = visible_block(slot, place % size, causal=causal, window=window)
            return torch.where(place < 0, context, own & (place // size == block))

        slots = batch.num_anchors * size
        device = anchors_N.device
        return create_block_mask(seen, None, None, slots, num_context + slots, device=str(device))


@lru_cache(maxsize=1)
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)
