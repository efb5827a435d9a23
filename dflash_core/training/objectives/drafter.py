"""Train the drafter on the frozen target's features."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dflash_core.corpus.store import Sample, TokenStore
from dflash_core.draft.anchors import EVERY_POSITION, opening
from dflash_core.draft.batch import DraftBatch, collate
from dflash_core.draft.build import build_drafter
from dflash_core.draft.loss import DraftLoss, acceptance_at_anchors, decoding_rounds, draft_loss
from dflash_core.draft.model import DraftModel
from dflash_core.errors import DraftError
from dflash_core.export.write import export_drafter
from dflash_core.export.zlab import load_drafter
from dflash_core.planning.anchors import AnchorConfig
from dflash_core.target.loading import Target
from dflash_core.training.batches.length_groups import NUM_GROUPS
from dflash_core.training.batches.types import MicroBatch, read_rows
from dflash_core.training.config import TrainingJob
from dflash_core.training.draft_vocabulary import draft_vocabulary
from dflash_core.training.objectives.base import Outcome, autocast
from dflash_core.training.ranks.fsdp import spread
from dflash_core.training.ranks.groups import Ranks

__all__ = ["DraftObjective", "Layout"]

POSITION_ROWS = 6
COUNTS = 4


@dataclass(frozen=True)
class Layout:
    """Lays samples out as the drafter reads them; target ranks do the same as drafter ranks.

    Attributes:
        store: Training samples.
        held_out: Held-out samples.
        block_size: Block size of the drafter.
        mask_token_id: Its mask token.
        job: Anchor rule and seed.
        pin: Whether the batch goes to a GPU.
    """

    store: TokenStore
    held_out: TokenStore | None
    block_size: int
    mask_token_id: int
    job: TrainingJob
    pin: bool = False

    def __call__(self, micro_batch: MicroBatch) -> DraftBatch:
        """Return the batch in host memory."""
        store = self.held_out if micro_batch.held_out else self.store
        assert store is not None
        rows, anchors = read_rows(micro_batch, store), self.job.batching.anchors
        if micro_batch.held_out:
            anchors = EVERY_POSITION
            rows = [[replace(s, loss_mask=opening(s.loss_mask)) for s in row] for row in rows]
        batch = collate(
            rows,
            padded_length=micro_batch.padded_length,
            block_size=self.block_size,
            mask_token_id=self.mask_token_id,
            anchors=anchors,
            seed=self.job.training.seed,
            epoch=micro_batch.epoch,
            distils=self.job.loss.distils,
        )
        return batch.pin_memory() if self.pin else batch


class DraftObjective:
    """Runs the drafter on the anchors of a micro-batch.

    Args:
        job: The run.
        target: The target; its decoder layers are not needed here.
        store: Training samples.
        held_out: Held-out samples.
        ranks: This process among the others, over which the drafter may be spread.
    """

    def __init__(
        self,
        job: TrainingJob,
        target: Target,
        store: TokenStore,
        held_out: TokenStore | None,
        ranks: Ranks | None = None,
    ) -> None:
        self.drafter: DraftModel = (
            _new_drafter(job, target, store)
            if job.init_drafter is None
            else _warm_start(job, job.init_drafter, target, store)
        )
        spec = self.drafter.spec
        self._device = target.lm_head.weight.device
        self.prepare = Layout(
            store,
            held_out,
            spec.block_size,
            spec.mask_token_id,
            job,
            pin=self._device.type == "cuda",
        )
        self._loss = job.loss
        self._precision = job.training.precision
        self.num_positions = spec.block_size
        self.guess_loss = math.log(spec.draft_vocab_size or spec.vocab_size)
        self.num_sums = 2 + COUNTS + POSITION_ROWS * spec.block_size
        self._embedding_VD = target.input_embeddings.weight
        self._head_VD = target.lm_head.weight
        self._is_spread = ranks is not None and ranks.spread is not None
        if ranks is not None and self._is_spread:
            layers, precision = self.drafter.layers, self._precision
            spread(self.drafter, layers, ranks, precision=precision, forwards=["context"])

    @property
    def module(self) -> nn.Module:
        """The drafter."""
        return self.drafter

    def run(
        self, micro_batch: MicroBatch, batch: Any, features_MF: Tensor | None, groups: Tensor
    ) -> Outcome:
        """Sum the loss over the micro-batch's anchors and add its gradient."""
        assert isinstance(batch, DraftBatch)
        assert features_MF is not None
        if batch.num_anchors == 0:
            self.idle()
        weight = micro_batch.weight
        result = self._learn(features_MF, batch, weight)
        counted = [
            float(result.loss_sum.detach()),
            float(result.weight_sum),
            batch.num_anchors,
            batch.num_covered,
            batch.num_without_anchors,
            decoding_rounds(result.correct_NK, batch) if micro_batch.held_out else 0,
        ]
        by_position = result.by_position.flatten().cpu()
        sums = torch.cat([torch.tensor(counted, dtype=torch.float64), by_position]) * weight
        return _outcome(sums, result, batch, groups, weight)

    def idle(self) -> None:
        """Run a single anchor with weight 0, where the drafter is spread."""
        if not self._is_spread:
            return
        spec, loss = self.drafter.spec, self._loss
        batch = _next_to_nothing(spec.block_size, spec.mask_token_id, distils=loss.distils)
        width = spec.feature_size + loss.distils * spec.hidden_size
        features_MF = self._embedding_VD.new_zeros(len(batch.context_index_M), width)
        self._learn(features_MF, batch.to(self._device), 0.0)

    def _learn(self, features_MF: Tensor, batch: DraftBatch, weight: float) -> DraftLoss:
        with autocast(self._device, self._precision):
            result = draft_loss(
                self.drafter,
                features_MF,
                batch,
                self._loss,
                embedding_VD=self._embedding_VD,
                head_VD=self._head_VD,
            )
        if torch.is_grad_enabled():
            (result.loss_sum * weight).backward()
        return result

    def describe(self, sums: Tensor) -> dict[str, Any]:
        """Return loss and accuracy, overall and by block position, and what they are made of.

        Of held-out samples also the acceptance length that decoding them would have.
        """
        by_position = sums[2 + COUNTS :].view(POSITION_ROWS, -1)
        loss, scored, correct, supervised = by_position[:4, 1:]
        return {
            "loss": float(sums[0]) / max(float(sums[1]), 1e-12),
            "loss_by_position": (loss / scored.clamp(min=1)).tolist(),
            "accuracy": float(correct.sum() / supervised.sum().clamp(min=1)),
            "accuracy_by_position": (correct / supervised.clamp(min=1)).tolist(),
            "acceptance_at_anchors": acceptance_at_anchors(by_position),
            "num_anchors": int(sums[2]),
            "covered_tokens": int(sums[3]),
            "samples_without_anchors": int(sums[4]),
            **({"expected_acceptance": self.score(sums)} if sums[5] else {}),
        }

    def score(self, sums: Tensor) -> float:
        """Return the acceptance length that greedy decoding of these very texts would have."""
        return float(sums[2] / sums[5])

    def rebuilt(self, weights: dict[str, Tensor]) -> DraftModel:
        """Return a drafter like this one, of whole weights, on the same device."""
        drafter = DraftModel(self.drafter.spec, self.drafter.draft_token_ids)
        drafter.load_state_dict(weights, assign=True)
        return drafter.to(self._device)

    def save(self, run_dir: Path, weights: dict[str, Tensor], facts: dict[str, Any]) -> Path:
        """Write the drafter in z-lab layout."""
        return export_drafter(self.rebuilt(weights), run_dir / "drafter", manifest=facts)


def _next_to_nothing(block_size: int, mask_token_id: int, *, distils: bool) -> DraftBatch:
    """Return a batch of one anchor."""
    ids = np.full(3, int(mask_token_id == 0), dtype=np.int32)
    sample = Sample(ids, np.array([False, True, True]), "", "")
    return collate(
        [[sample]],
        padded_length=len(ids),
        block_size=block_size,
        mask_token_id=mask_token_id,
        anchors=AnchorConfig(),
        seed=0,
        epoch=0,
        distils=distils,
    )


def _outcome(
    sums: Tensor, result: DraftLoss, batch: DraftBatch, groups: Tensor, weight: float
) -> Outcome:
    documents_N = batch.anchor_documents_N.cpu()
    weight_NK = result.weight_NK.detach().cpu().double()
    loss_NK = weight_NK * result.loss_NK.detach().cpu().double()
    size = (NUM_GROUPS, loss_NK.shape[1])
    by_sample = torch.zeros(batch.num_documents, 2, dtype=torch.float64)
    by_sample[:, 0].index_add_(0, documents_N, loss_NK.sum(1))
    by_sample[:, 1].index_add_(0, documents_N, weight_NK.sum(1))
    anchors_N = groups[documents_N]
    return Outcome(
        sums=sums,
        loss_GK=torch.zeros(size, dtype=torch.float64).index_add_(0, anchors_N, loss_NK * weight),
        weight_GK=torch.zeros(size, dtype=torch.float64).index_add_(
            0, anchors_N, weight_NK * weight
        ),
        by_sample=by_sample,
    )


def _new_drafter(job: TrainingJob, target: Target, store: TokenStore) -> DraftModel:
    ids = draft_vocabulary(job, target, store)
    return build_drafter(job.draft, target, seed=job.training.seed, draft_token_ids=ids)


def _warm_start(job: TrainingJob, path: Path, target: Target, store: TokenStore) -> DraftModel:
    """Load a drafter of the shape that the settings ask for."""
    drafter = _new_drafter(job, target, store)
    stored = load_drafter(path, dtype=torch.float32)
    wanted, found = drafter.spec, stored.spec
    # The layout has no field for a reduced vocabulary, which is no tensor of the drafter either.
    names = [name for name in type(wanted).model_fields if name != "draft_vocab_size"]
    changed = [name for name in names if getattr(wanted, name) != getattr(found, name)]
    if changed:
        differs = "; ".join(
            f"{name} is {getattr(found, name)}, not {getattr(wanted, name)}" for name in changed
        )
        raise DraftError(
            f"the drafter in {path} is none that this target and the draft section ask for "
            f"({differs}); start from one that is, or from none: set or leave out --init-drafter "
            "(run.warm_start in a flow)"
        )
    drafter.load_state_dict(stored.state_dict())
    return drafter.to(target.lm_head.weight.device).train().requires_grad_(True)
