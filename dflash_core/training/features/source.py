"""Where the drafter's context features come from: the target, here or on another rank, or a cache.

Legend: B rows, T slots, M context tokens, F features.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash_core.draft.anchors import eligible_anchors
from dflash_core.draft.batch import DraftBatch
from dflash_core.draft.config import LossConfig
from dflash_core.errors import ConfigError
from dflash_core.target.loading import Target
from dflash_core.training.batches.types import MicroBatch
from dflash_core.training.features.cache import FeatureCache
from dflash_core.training.ranks.lane import wait_for_device

__all__ = [
    "CachedFeatures",
    "FeatureSource",
    "OnlineFeatures",
    "check_documents_apart",
    "check_packing",
    "feature_shape",
    "timed",
]

# Of the other kinds two short documents would not show all: chunks and compressed keys are long.
DOCUMENT_WISE = {"full_attention", "sliding_attention", "indexed_attention", "moe", "mlp"}
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}


class FeatureSource(Protocol):
    """Gives the features of a batch's context tokens, as a stand-in may."""

    def __call__(self, micro_batch: MicroBatch, batch: DraftBatch) -> Tensor:
        """Return features, shape (M, F), on the batch's device."""
        ...


def feature_shape(target: Target, loss: LossConfig) -> tuple[int, torch.dtype]:
    """Return width and type of a token's features: the captured layers, and what the loss adds."""
    embedding_VD = target.input_embeddings.weight
    layers = len(target.layer_ids) + loss.distils
    return layers * embedding_VD.shape[1], embedding_VD.dtype


class OnlineFeatures:
    """Runs the target.

    Args:
        target: The target.
        packed: Whether rows hold several documents.
        final_hidden: Whether the loss needs what the target's head reads, too.

    Raises:
        ConfigError: The target's tokens see beyond their document in packed rows.
    """

    def __init__(self, target: Target, *, packed: bool, final_hidden: bool = False) -> None:
        if packed:
            check_packing(target)
        self._target = target
        self._packed = packed
        self._final_hidden = final_hidden

    def rows(self, batch: DraftBatch) -> Tensor:
        """Return features of all slots, shape (B, T, F)."""
        positions_BT = batch.position_ids_BT if self._packed else None
        # Right padding is never seen by a real token of a causal model: no mask is needed.
        return self._target.features(
            batch.input_ids_BT, position_ids_BT=positions_BT, final_hidden=self._final_hidden
        )

    def __call__(self, micro_batch: MicroBatch, batch: DraftBatch) -> Tensor:
        """Return features of the context tokens."""
        return self.rows(batch).flatten(0, 1)[batch.context_index_M]


def check_packing(target: Target) -> None:
    """Refuse a target whose features of packed documents are not those of each alone.

    Raises:
        ConfigError: This target cannot take packed rows.
    """
    check_documents_apart(
        target.model, lambda ids_1T, positions_1T: target.features(ids_1T, None, positions_1T)[0]
    )


@torch.no_grad()
def check_documents_apart(model: Any, run: Callable[[Tensor, Tensor | None], Tensor]) -> None:
    """Refuse layers whose state runs on, and run two documents in one row and apart.

    Args:
        model: A transformers model.
        run: Runs it on token ids and positions, counted from 0 when None, and returns a row for
            each token or for each but the last.

    Raises:
        ConfigError: The outputs differ: this target cannot take packed rows.
    """
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    if leaking := sorted(set(kinds) - DOCUMENT_WISE):
        raise ConfigError(
            f"batching.strategy 'packed' needs a target whose tokens see their own document only, "
            f"but this {type(model).__name__} has {' and '.join(leaking)} layers, which know no "
            "documents; set batching.strategy to sorted, random, bucketed or pooled"
        )
    embedding_VD = model.get_input_embeddings().weight
    device = embedding_VD.device
    ids_1T = (torch.arange(24, device=device) * 7 % min(len(embedding_VD), 97))[None]
    positions_1T = torch.arange(12, device=device).repeat(2)[None]
    together = run(ids_1T, positions_1T)[12:]
    apart = run(ids_1T[:, 12:], None).float()
    error = float((together.float() - apart).abs().max() / apart.abs().max().clamp(min=1e-6))
    if not error <= PROBE_TOLERANCE[together.dtype]:
        raise ConfigError(
            f"batching.strategy 'packed' needs a target whose tokens see their own document only, "
            f"but with attention '{model.config._attn_implementation}' this "
            f"{type(model).__name__} differs by {error:.2g}; set batching.strategy to "
            "sorted, random, bucketed or pooled"
        )


def timed(source: Any, micro_batch: MicroBatch, batch: DraftBatch) -> tuple[Tensor, float]:
    """Return features and the seconds they took."""
    begin = time.perf_counter()
    features_MF = source(micro_batch, batch)
    wait_for_device(features_MF.device)
    return features_MF, time.perf_counter() - begin


class CachedFeatures:
    """Reads features that were captured before; runs the target for what is missing or damaged.

    Args:
        caches: Of the training samples and of the held-out ones.
        online: Loads the target, when it is first needed.
        device: Where features go.
        final_hidden: Whether the last anchor's own token is needed, too: it predicts the next.
    """

    def __init__(
        self,
        caches: tuple[FeatureCache, FeatureCache | None],
        online: Callable[[], OnlineFeatures],
        device: torch.device,
        *,
        final_hidden: bool = False,
    ) -> None:
        self._final_hidden = final_hidden
        self._caches = caches
        self._load = online
        self._online: OnlineFeatures | None = None
        self._device = device

    def __call__(self, micro_batch: MicroBatch, batch: DraftBatch) -> Tensor:
        """Return features of the context tokens."""
        cache = self._caches[micro_batch.held_out]
        assert cache is not None
        documents_M = batch.document_ids_BT.flatten()[batch.context_index_M]
        counts = torch.bincount(documents_M, minlength=batch.num_documents).tolist()
        found = [
            cache.read(sample, count)
            for sample, count in zip(micro_batch.samples, counts, strict=True)
        ]
        kept = [piece for piece in found if piece is not None]
        if len(kept) == len(found):
            return torch.cat(kept).to(self._device)
        # The whole micro-batch is run, so that losses are those of an online run bit for bit.
        self._online = self._online or self._load()
        features_TF = self._online.rows(batch).flatten(0, 1)
        if micro_batch.every == 1:
            self._write(cache, micro_batch, batch, features_TF)
        return features_TF[batch.context_index_M]

    def _write(
        self, cache: FeatureCache, micro_batch: MicroBatch, batch: DraftBatch, all_TF: Tensor
    ) -> None:
        """Keep every token that a block of any epoch may need."""
        documents_T = batch.document_ids_BT.flatten().cpu()
        mask_T = batch.loss_mask_BT.flatten().cpu().numpy()
        for document, sample in enumerate(micro_batch.samples):
            places = torch.nonzero(documents_T == document).flatten()
            start, end = int(places[0]), int(places[-1]) + 1
            eligible = eligible_anchors(mask_T[start:end])
            count = max(int(eligible[-1]) + self._final_hidden, 1) if len(eligible) else 0
            cache.write(sample, all_TF[start : start + count])
