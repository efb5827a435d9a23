"""Train the drafter on the frozen target's features."""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflash_core.corpus.store import TokenStore
from dflash_core.draft import (
    DraftModel,
    LossConfig,
    build_drafter,
    collate,
    draft_loss,
    expected_acceptance,
)
from dflash_core.draft.config import DraftConfig
from dflash_core.errors import ConfigError, DraftError
from dflash_core.export import export_drafter, load_drafter
from dflash_core.planning.anchors import AnchorConfig
from dflash_core.target.config import TargetConfig
from dflash_core.target.loading import Target, load_target
from dflash_core.training.objective import MicroBatch, autocast

__all__ = ["DraftObjective"]

POSITION_ROWS = 6


class DraftObjective:
    """Runs the target on a micro-batch, then the drafter on its anchors.

    Args:
        target: The target's settings.
        draft: The drafter's shape.
        loss: The drafter's loss.
        anchors: The anchor rule.
        store: Samples.
        seed: Seed of fresh weights and of anchors.
        device: Where it runs.
        precision: Precision of the drafter's matrix products.
        init_drafter: A drafter to start from instead of fresh weights.
    """

    def __init__(
        self,
        target: TargetConfig,
        draft: DraftConfig,
        loss: LossConfig,
        anchors: AnchorConfig,
        store: TokenStore,
        *,
        seed: int,
        device: torch.device,
        precision: str,
        init_drafter: Path | None = None,
    ) -> None:
        if loss.kind == "forward_kl":
            raise ConfigError(
                "loss.kind 'forward_kl' needs the target's final hidden state, which this trainer "
                "does not capture; set loss.kind to 'decayed_ce' or 'dpace'"
            )
        if draft.draft_vocab_size is not None:
            raise ConfigError(
                f"draft.draft_vocab_size {draft.draft_vocab_size} cannot be trained yet; leave it "
                "out to draft over the whole vocabulary"
            )
        self.target: Target = load_target(target, device=device)
        self.drafter: DraftModel = (
            build_drafter(draft, self.target, seed=seed)
            if init_drafter is None
            else _warm_start(init_drafter, draft, self.target)
        )
        self._loss = loss
        self._anchors = anchors
        self._store = store
        self._seed = seed
        self._device = device
        self._precision = precision
        block_size = self.drafter.spec.block_size
        self.num_sums = 7 + POSITION_ROWS * block_size
        self._embedding_VD = self.target.input_embeddings.weight
        self._head_VD = self.target.lm_head.weight

    @property
    def module(self) -> nn.Module:
        """The drafter."""
        return self.drafter

    def run(self, micro_batch: MicroBatch) -> Tensor:
        """Add the gradient of the weighted loss sum over the micro-batch's anchors."""
        start = time.perf_counter()
        batch = collate(
            micro_batch.samples(self._store),
            padded_length=micro_batch.padded_length,
            block_size=self.drafter.spec.block_size,
            mask_token_id=self.drafter.spec.mask_token_id,
            anchors=self._anchors,
            seed=self._seed,
            epoch=micro_batch.epoch,
        ).to(self._device)
        begin = time.perf_counter()
        features_BTF = self.target.features(batch.input_ids_BT)
        middle = time.perf_counter()
        with autocast(self._device, self._precision):
            result = draft_loss(
                self.drafter,
                features_BTF,
                batch,
                self._loss,
                embedding_VD=self._embedding_VD,
                head_VD=self._head_VD,
            )
        (result.loss_sum * micro_batch.weight).backward()
        end = time.perf_counter()
        loss_sum, weight_sum = float(result.loss_sum.detach()), float(result.weight_sum)
        counted = [
            loss_sum * micro_batch.weight,
            weight_sum * micro_batch.weight,
            batch.num_anchors,
            batch.num_covered,
            batch.num_without_anchors,
            middle - begin,
            (begin - start) + (end - middle),
        ]
        by_position = result.by_position.flatten().cpu() * micro_batch.weight
        return torch.cat([torch.tensor(counted, dtype=torch.float64), by_position])

    def describe(self, sums: Tensor) -> dict[str, Any]:
        """Return the loss, overall and by block position, and what it promises in acceptance."""
        by_position = sums[7:].view(POSITION_ROWS, -1)
        loss, scored, correct, supervised = by_position[:4, 1:]
        return {
            "loss": float(sums[0]) / max(float(sums[1]), 1e-12),
            "loss_by_position": (loss / scored.clamp(min=1)).tolist(),
            "accuracy": float(correct.sum() / supervised.sum().clamp(min=1)),
            "accuracy_by_position": (correct / supervised.clamp(min=1)).tolist(),
            "expected_acceptance": expected_acceptance(by_position),
            "num_anchors": int(sums[2]),
            "covered_tokens": int(sums[3]),
            "samples_without_anchors": int(sums[4]),
            "target_s": float(sums[5]),
            "draft_s": float(sums[6]),
        }

    def save(self, run_dir: Path, facts: dict[str, Any]) -> Path:
        """Write the drafter in z-lab layout."""
        return export_drafter(self.drafter, run_dir / "drafter", manifest=facts)


def _warm_start(path: Path, draft: DraftConfig, target: Target) -> DraftModel:
    """Load a drafter of the shape that the settings ask for."""
    drafter = load_drafter(path, dtype=torch.float32)
    wanted = build_drafter(draft, target).spec
    if drafter.spec != wanted:
        changed = [
            name
            for name in wanted.model_dump()
            if getattr(wanted, name) != getattr(drafter.spec, name)
        ]
        raise DraftError(
            f"the drafter in {path} differs from the settings in {', '.join(changed)}; set the "
            "draft section to its shape or leave init_drafter out"
        )
    return drafter.to(target.lm_head.weight.device).train().requires_grad_(True)
