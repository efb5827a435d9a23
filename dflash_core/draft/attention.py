"""Who sees whom: context strictly before the anchor, of its document, and the own block.

`visible` is the one definition; `dense_mask` draws it as a matrix. `SlicedAttention` computes it
without that matrix: anchors of one document stand in chunks, each chunk reads only the context
before its last anchor, and chunks of like context length share one SDPA call. What is wasted is
the stair between a chunk's anchors and the chunk's neighbours' blocks, not ``(N K) (M + N K)``.

Legend: M context tokens, N anchors, K block size, C chunks, G anchors of a chunk, L context
tokens of a slice, H heads, E head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_core.draft.batch import DraftBatch
from dflash_core.draft.model import KeyValue
from dflash_core.draft.spec import DraftSpec

__all__ = ["SlicedAttention", "dense_mask", "visible_block", "visible_context"]

CHUNK_SLOTS = 64  # queries of a chunk: larger wastes neighbours' blocks, smaller copies context
SLICE_GROWTH = 1.25  # longest over shortest context in a slice
SLICE_TOKENS = 1 << 16  # context tokens gathered at a time


def visible_context(
    query_positions: Tensor, anchors: Tensor, key_positions: Tensor, window: int | None
) -> Tensor:
    """Return where a slot sees a context token of its own document.

    Args:
        query_positions: Position of the slot; broadcast with the others.
        anchors: Position of its block's anchor.
        key_positions: Position of the context token.
        window: Tokens back that the layer sees, or None for all.
    """
    seen = key_positions < anchors
    return seen if window is None else seen & (query_positions - key_positions < window)


def visible_block(
    query_slots: Tensor, key_slots: Tensor, *, causal: bool, window: int | None
) -> Tensor:
    """Return where a slot sees another slot of its own block."""
    distance = query_slots - key_slots
    seen = (distance >= 0) if causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if window is None else seen & (distance < window) & (-distance < window)


def dense_mask(batch: DraftBatch, spec: DraftSpec, layer: int) -> Tensor:
    """Return the whole mask, shape (N * K, M + N * K), for tests, figures and comparison."""
    size = spec.block_size
    slots = torch.arange(size, device=batch.labels_NK.device)
    anchors = batch.anchor_positions_N.repeat_interleave(size)[:, None]
    query = (batch.anchor_positions_N[:, None] + slots).reshape(-1, 1)
    documents = batch.document_ids_BT.flatten()[batch.context_index_M]
    same = batch.anchor_documents_N.repeat_interleave(size)[:, None] == documents
    window = spec.window(layer)
    context = visible_context(query, anchors, batch.context_positions_M, window) & same
    block = torch.arange(len(batch.anchor_positions_N), device=slots.device)
    block = block.repeat_interleave(size)
    slot = slots.repeat(batch.num_anchors)
    own = visible_block(slot[:, None], slot, causal=spec.causal(layer), window=window) & (
        block[:, None] == block
    )
    return torch.cat([context, own], dim=1)


@dataclass(frozen=True)
class _Slice:
    """Chunks of like context length.

    Attributes:
        anchors_CG: Anchors of each chunk; short chunks repeat their last one.
        context_CL: Context tokens of each chunk, as indices into M; a shorter chunk repeats its
            last one, which the mask hides since the columns go on counting.
    """

    anchors_CG: Tensor
    context_CL: Tensor


class SlicedAttention:
    """Training attention by SDPA; made once per micro-batch and shared by all layers."""

    def __init__(self, batch: DraftBatch, spec: DraftSpec) -> None:
        self.spec = spec
        self.positions_N = batch.anchor_positions_N
        self.slices = _slices(batch, max(CHUNK_SLOTS // spec.block_size, 1))
        order = torch.cat([piece.anchors_CG.flatten() for piece in self.slices])
        places = torch.arange(len(order), device=order.device)
        # A short chunk repeats its last anchor; the first of equal places is read.
        self.place_N = torch.full_like(self.positions_N, len(order)).scatter_reduce_(
            0, order, places, "amin"
        )
        self._masks: dict[tuple[bool, int | None, torch.dtype], list[Tensor]] = {}

    def __call__(self, query_NKHE: Tensor, own: KeyValue, context: KeyValue, layer: int) -> Tensor:
        """Return the attended values, shape (N, K, H, E)."""
        masks = self._layer_masks(layer, query_NKHE.dtype)
        pieces = [
            _attend(query_NKHE, own, context, piece, mask)
            for piece, mask in zip(self.slices, masks, strict=True)
        ]
        return torch.cat(pieces).index_select(0, self.place_N)

    def _layer_masks(self, layer: int, dtype: torch.dtype) -> list[Tensor]:
        key = (self.spec.causal(layer), self.spec.window(layer), dtype)
        if key not in self._masks:
            self._masks[key] = [self._mask(piece, *key) for piece in self.slices]
        return self._masks[key]

    def _mask(self, piece: _Slice, causal: bool, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the additive mask of a slice, shape (C, 1, G * K, L + G * K)."""
        size = self.spec.block_size
        num_chunks, width = piece.anchors_CG.shape
        slots = torch.arange(size, device=piece.anchors_CG.device)
        anchors_CG1 = self.positions_N[piece.anchors_CG][:, :, None]
        # A kept context begins at position 0: the column is the position.
        columns_L = torch.arange(piece.context_CL.shape[1], device=slots.device)
        context = visible_context(
            (anchors_CG1 + slots)[..., None], anchors_CG1[..., None], columns_L, window
        )
        context = context.expand(-1, -1, size, -1).flatten(1, 2)
        same = torch.eye(width, dtype=torch.bool, device=slots.device)
        inner = visible_block(slots[:, None], slots, causal=causal, window=window)
        own = (same[:, None, :, None] & inner[None, :, None, :]).reshape(2 * [width * size])
        seen = torch.cat([context, own.expand(num_chunks, -1, -1)], dim=-1)
        bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return bias.masked_fill_(~seen, float("-inf"))[:, None]


def _attend(
    query_NKHE: Tensor, own: KeyValue, context: KeyValue, piece: _Slice, mask: Tensor
) -> Tensor:
    """Return the attended values of a slice's places, shape (C * G, K, H, E)."""
    size = query_NKHE.shape[1]
    width = piece.anchors_CG.shape[1]
    query = query_NKHE[piece.anchors_CG].flatten(1, 2).transpose(1, 2)
    key, value = (
        torch.cat([c[piece.context_CL], o[piece.anchors_CG].flatten(1, 2)], dim=1).transpose(1, 2)
        for c, o in zip(context, own, strict=True)
    )
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2).unflatten(1, (width, size)).flatten(0, 1)


def _slices(batch: DraftBatch, width: int) -> list[_Slice]:
    """Cut the anchors into chunks and gather chunks of like context length."""
    chunks: list[tuple[int, int, int]] = []  # context length, first anchor, anchors
    documents = batch.anchor_documents_N.tolist()
    positions = batch.anchor_positions_N.tolist()
    first = 0
    for index in range(1, len(documents) + 1):
        full = index - first == width
        if index == len(documents) or full or documents[index] != documents[first]:
            chunks.append((max(positions[index - 1], 1), first, index - first))
            first = index
    chunks.sort(reverse=True)
    slices: list[_Slice] = []
    start = 0
    for index in range(1, len(chunks) + 1):
        longest = chunks[start][0]
        if (
            index == len(chunks)
            or chunks[index][0] * SLICE_GROWTH + CHUNK_SLOTS < longest
            or (index - start + 1) * longest > SLICE_TOKENS
        ):
            slices.append(_slice(batch, chunks[start:index], width))
            start = index
    return slices


def _slice(batch: DraftBatch, chunks: list[tuple[int, int, int]], width: int) -> _Slice:
    device = batch.context_starts_N.device
    length = chunks[0][0]
    first_C1 = torch.tensor([[chunk[1]] for chunk in chunks], device=device)
    count_C1 = torch.tensor([[chunk[2]] for chunk in chunks], device=device)
    offsets = torch.arange(width, device=device)
    starts_C1 = batch.context_starts_N[first_C1]
    lengths_C1 = torch.tensor([[chunk[0]] for chunk in chunks], device=device)
    columns = torch.arange(length, device=device)
    return _Slice(
        anchors_CG=first_C1 + torch.minimum(offsets, count_C1 - 1),
        context_CL=starts_C1 + torch.minimum(columns, lengths_C1 - 1),
    )
