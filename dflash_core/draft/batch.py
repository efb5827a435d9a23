"""A micro-batch as the drafter sees it: rows of documents, anchors, their contexts and labels.

Everything is index arithmetic on the host, once, before any device is involved. Contexts are
ragged: of each document only the tokens before its last anchor are kept (for distillation those
before its last scored slot), so padding, whatever follows and the other documents of a packed row
cost the drafter nothing.

Legend: B rows, T row slots, M context tokens kept, N anchors, K block size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_core.corpus.store import Sample
from dflash_core.draft.anchors import sample_anchors
from dflash_core.errors import DataError
from dflash_core.planning.anchors import AnchorConfig

__all__ = ["DraftBatch", "collate"]


@dataclass(frozen=True)
class DraftBatch:
    """One micro-batch.

    Attributes:
        input_ids_BT: Token ids, 0 on padding.
        loss_mask_BT: Supervised tokens.
        document_ids_BT: Index of the document within the batch, -1 on padding.
        position_ids_BT: Position within the document, 0 on padding.
        anchor_rows_N: Row of each anchor; anchors are sorted by row, then column.
        anchor_columns_N: Slot of each anchor in its row.
        anchor_positions_N: Position of each anchor in its document.
        anchor_documents_N: Document of each anchor.
        context_index_M: Kept tokens, as indices into the flattened rows.
        context_positions_M: Their positions in their documents.
        context_starts_N: First kept context token of each anchor's document, an index into M.
        labels_NK: Tokens that the slots stand for; slot 0 is the anchor itself.
        valid_NK: Slots that are scored: after slot 0, up to the first token of the document that
            is not supervised. A slot beyond a gap could never be reached in decoding.
        num_documents: Documents of the batch.
        num_without_anchors: Documents that have no eligible position.
        num_supervised: Supervised tokens.
        num_covered: Supervised tokens that stand in at least one scored slot.
    """

    input_ids_BT: Tensor
    loss_mask_BT: Tensor
    document_ids_BT: Tensor
    position_ids_BT: Tensor
    anchor_rows_N: Tensor
    anchor_columns_N: Tensor
    anchor_positions_N: Tensor
    anchor_documents_N: Tensor
    context_index_M: Tensor
    context_positions_M: Tensor
    context_starts_N: Tensor
    labels_NK: Tensor
    valid_NK: Tensor
    num_documents: int
    num_without_anchors: int
    num_supervised: int
    num_covered: int

    @property
    def attention_mask_BT(self) -> Tensor:
        """True on real tokens."""
        return self.document_ids_BT >= 0

    @property
    def num_anchors(self) -> int:
        """Anchors of the batch."""
        return len(self.anchor_rows_N)

    @property
    def is_packed(self) -> bool:
        """Whether any row holds more than one document."""
        return self.num_documents > len(self.input_ids_BT)

    def to(self, device: torch.device | str) -> "DraftBatch":
        """Return the batch on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "DraftBatch":
        """Return the batch in page-locked memory."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> "DraftBatch":
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **{name: change(tensor) for name, tensor in tensors.items()})


def collate(
    rows: Sequence[Sequence[Sample]],
    *,
    padded_length: int,
    block_size: int,
    mask_token_id: int,
    anchors: AnchorConfig,
    seed: int,
    epoch: int,
    distils: bool = False,
) -> DraftBatch:
    """Lay samples out as a micro-batch and draw their anchors.

    Args:
        rows: The documents of each row: one, or several when packed.
        padded_length: Slots of a row.
        block_size: Block size of the drafter.
        mask_token_id: The drafter's mask token, which no sample may hold.
        anchors: How many anchors a document gets.
        seed: Seed of the run.
        epoch: Epoch, counted from 0.
        distils: Whether tokens are kept up to the last scored slot, for the loss that needs what
            the target says after each of them.

    Raises:
        DataError: A row does not fit, or a sample holds the mask token.
    """
    shape = (len(rows), padded_length)
    input_ids = np.zeros(shape, dtype=np.int64)
    loss_mask = np.zeros(shape, dtype=np.bool_)
    document_ids = np.full(shape, -1, dtype=np.int64)
    position_ids = np.zeros(shape, dtype=np.int64)
    documents: list[_Document] = []
    kept = supervised = 0
    for row, samples in enumerate(rows):
        column = 0
        for sample in samples:
            length = len(sample.input_ids)
            end = column + length
            _check_sample(sample, end, padded_length, mask_token_id)
            input_ids[row, column:end] = sample.input_ids
            loss_mask[row, column:end] = sample.loss_mask
            document_ids[row, column:end] = len(documents)
            position_ids[row, column:end] = np.arange(length)
            positions = sample_anchors(
                sample.loss_mask, sample.sample_id, seed=seed, epoch=epoch, config=anchors
            )
            document = _lay_out(
                sample, positions, row, column, padded_length, kept, block_size, distils
            )
            kept += document.num_context
            supervised += int(np.count_nonzero(sample.loss_mask))
            documents.append(document)
            column = end
    return DraftBatch(
        input_ids_BT=torch.from_numpy(input_ids),
        loss_mask_BT=torch.from_numpy(loss_mask),
        document_ids_BT=torch.from_numpy(document_ids),
        position_ids_BT=torch.from_numpy(position_ids),
        anchor_rows_N=_join([np.full(len(d.positions), d.row) for d in documents]),
        anchor_columns_N=_join([d.positions + d.column for d in documents]),
        anchor_positions_N=_join([d.positions for d in documents]),
        anchor_documents_N=_join([np.full(len(d.positions), i) for i, d in enumerate(documents)]),
        context_index_M=_join([d.flat_start + np.arange(d.num_context) for d in documents]),
        context_positions_M=_join([np.arange(d.num_context) for d in documents]),
        context_starts_N=_join([np.full(len(d.positions), d.kept_start) for d in documents]),
        labels_NK=_join([d.labels for d in documents]).view(-1, block_size),
        valid_NK=_join([d.valid for d in documents]).view(-1, block_size).bool(),
        num_documents=len(documents),
        num_without_anchors=sum(len(d.positions) == 0 for d in documents),
        num_supervised=supervised,
        num_covered=sum(d.num_covered for d in documents),
    )


@dataclass(frozen=True)
class _Document:
    positions: NDArray[np.int64]
    row: int
    column: int
    flat_start: int
    kept_start: int
    num_context: int
    labels: NDArray[np.int64]
    valid: NDArray[np.int64]
    num_covered: int


def _lay_out(
    sample: Sample,
    positions: NDArray[np.int64],
    row: int,
    column: int,
    padded_length: int,
    kept_start: int,
    block_size: int,
    distils: bool,
) -> _Document:
    length = len(sample.input_ids)
    slots = positions[:, None] + np.arange(block_size)
    inside = np.minimum(slots, length - 1)
    valid = (slots < _run_ends(sample.loss_mask)[positions][:, None]) & (slots > slots[:, :1])
    num_context = 0
    if len(positions):
        # An anchor at position 0 has no context; one token is kept so that no gather is empty.
        num_context = int(slots[valid].max()) if distils else max(int(positions[-1]), 1)
    return _Document(
        positions=positions,
        row=row,
        column=column,
        flat_start=row * padded_length + column,
        kept_start=kept_start,
        num_context=num_context,
        labels=np.asarray(sample.input_ids, dtype=np.int64)[inside].ravel(),
        valid=valid.astype(np.int64).ravel(),
        num_covered=len(np.unique(slots[valid])),
    )


def _run_ends(loss_mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return, for each position, the next position at or after it that is not supervised."""
    length = len(loss_mask)
    stops = np.where(loss_mask, length, np.arange(length))
    return np.minimum.accumulate(stops[::-1])[::-1]


def _check_sample(sample: Sample, end: int, padded_length: int, mask_token_id: int) -> None:
    if end > padded_length:
        raise DataError(
            f"sample {sample.sample_id} ends at slot {end} of a row of {padded_length}; "
            "plan the store again"
        )
    if np.any(np.asarray(sample.input_ids) == mask_token_id):
        raise DataError(
            f"sample {sample.sample_id} holds token {mask_token_id}, which is the drafter's mask "
            "token; set draft.mask_token_id to an id that occurs nowhere in the data"
        )


def _join(parts: list[NDArray[np.int64]]) -> Tensor:
    empty = np.zeros(0, dtype=np.int64)
    return torch.from_numpy(np.concatenate([empty, *parts]).astype(np.int64, copy=False))
