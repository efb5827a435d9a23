"""The mask for FlexAttention: one kernel call a layer, whole tiles of unseen keys skipped.

The same definition as in `dflash_core.draft.attention`, as a function of indices. On a GPU the
kernel is compiled; on a CPU the plain form runs, which tests compare with the sliced one. Which
tiles of the mask the kernel visits follows from the anchors' positions: nothing is ever made that
is as large as the mask's ``(N K) (M + N K)`` cells.

Legend: M context tokens, N anchors, K block size, H heads, E head, Q query tiles, V key tiles.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash_core.draft.attention import visible_block, visible_context
from dflash_core.draft.batch import DraftBatch
from dflash_core.draft.model import KeyValue
from dflash_core.draft.spec import DraftSpec

__all__ = ["FlexAttention"]

TILE = 128  # queries, and keys, of a tile: the kernel's default


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
        visited_QV, whole_QV = _tiles(batch, size, window)
        return BlockMask.from_kv_blocks(
            *_listed(visited_QV & ~whole_QV),
            *_listed(whole_QV),
            BLOCK_SIZE=TILE,
            mask_mod=seen,
            seq_lengths=(slots, num_context + slots),
        )


def _tiles(batch: DraftBatch, size: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Return the tiles with cells that may be seen, and those whose every cell is.

    Contexts stand in the order of their anchors and each ends at its last anchor, so the context
    of a tile's queries is one range: from what its first anchor sees to its last anchor.
    """
    anchors_N, starts_N = batch.anchor_positions_N, batch.context_starts_N
    num_context, slots = len(batch.context_positions_M), batch.num_anchors * size
    tiles_Q = torch.arange(-(-slots // TILE), device=anchors_N.device)
    edges_V = torch.arange(-(-(num_context + slots) // TILE), device=anchors_N.device) * TILE
    first_Q = tiles_Q * TILE // size
    last_Q = ((tiles_Q * TILE + TILE - 1) // size).clamp(max=batch.num_anchors - 1)
    until_N = starts_N + anchors_N

    def since(anchor_Q: Tensor, slot: int) -> Tensor:
        if window is None:
            return starts_N[anchor_Q]
        return starts_N[anchor_Q] + (anchors_N[anchor_Q] + slot + 1 - window).clamp(min=0)

    def met(low_Q: Tensor, high_Q: Tensor) -> Tensor:
        return (edges_V + TILE > low_Q[:, None]) & (edges_V < high_Q[:, None])

    visited_QV = met(since(first_Q, 0), until_N[last_Q])
    visited_QV |= met(num_context + first_Q * size, num_context + (last_Q + 1) * size)
    low_Q1, high_Q1 = since(last_Q, size - 1)[:, None], until_N[first_Q][:, None]
    whole_QV = (edges_V >= low_Q1) & (edges_V + TILE <= high_Q1)
    whole_QV[slots // TILE :] = False  # a last tile with fewer queries
    return visited_QV, whole_QV


def _listed(tiles_QV: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many tiles of each row are chosen, and the row's tiles with those first."""
    order_QV = tiles_QV.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return tiles_QV.sum(dim=1).int()[None, None], order_QV.int()[None, None]


@lru_cache(maxsize=1)
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)
