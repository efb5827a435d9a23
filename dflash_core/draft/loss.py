"""The drafter's loss as sums, so that the trainer can normalise over a step and all ranks.

The head is frozen, so a chunk's gradient with respect to the hidden states is known as soon as
its logits are: it is computed in the forward pass, chunk by chunk, and no logits outlive their
chunk. Two head products in all (logits, gradient), nothing recomputed.

Slot weights: decayed cross-entropy ``exp(-(k - 1) / gamma)`` as published (arXiv 2602.06036);
D-PACE (arXiv 2605.18810) ``sum over m >= k of prod over i <= m of q_i`` with
``q = (1 - alpha) p(label) + alpha``, detached; forward KL uses the decay with the target's own
distribution at the token before as the soft label.

Legend: N anchors, K block size, D width, V vocabulary (the drafter's), U the target's, P scored
slots of a chunk.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_core.draft.attention import SlicedAttention
from dflash_core.draft.batch import DraftBatch
from dflash_core.draft.config import LossConfig
from dflash_core.draft.flex import FlexAttention
from dflash_core.draft.model import Attend, DraftModel
from dflash_core.errors import ConfigError

__all__ = [
    "DraftLoss",
    "acceptance_at_anchors",
    "decay_gamma",
    "decoding_rounds",
    "dpace_weights",
    "draft_hidden",
    "draft_loss",
]


@dataclass(frozen=True)
class DraftLoss:
    """Sums over one micro-batch.

    Attributes:
        loss_sum: Sum of weight times loss over scored slots, the only member with a gradient.
        weight_NK: Weight of each slot, 0 where nothing is scored.
        loss_NK: Cross-entropy (or KL divergence) of each scored slot, else 0.
        correct_NK: Scored slots whose most likely token is the label; in distillation, the token
            that the target itself would say there, of its whole vocabulary.
        scored_NK: Slots with a label that the drafter can propose.
        valid_NK: Slots with a supervised label, proposable or not.
    """

    loss_sum: Tensor
    weight_NK: Tensor
    loss_NK: Tensor
    correct_NK: Tensor
    scored_NK: Tensor
    valid_NK: Tensor

    @property
    def weight_sum(self) -> Tensor:
        """Sum of the weights, a float64 scalar on the device."""
        return self.weight_NK.sum(dtype=torch.float64)

    @property
    def by_position(self) -> Tensor:
        """Sums by block position, float64, shape ``(6, K)``, which add over batches and ranks.

        Rows: loss, scored slots, correct slots, supervised slots, blocks that are correct up to
        here, blocks that are supervised up to here. Loss is row 0 / row 1, accuracy row 2 /
        row 3, and `acceptance_at_anchors` reads the last two.
        """
        first = torch.ones_like(self.valid_NK[:, :1])
        reach = torch.cat([first, self.valid_NK[:, 1:]], dim=1).long().cumprod(1)
        run = torch.cat([first, self.correct_NK[:, 1:]], dim=1).long().cumprod(1)
        rows = [self.loss_NK, self.scored_NK, self.correct_NK, self.valid_NK, run, reach]
        return torch.stack([row.sum(0, dtype=torch.float64) for row in rows])


def acceptance_at_anchors(by_position: Tensor) -> float:
    """Return the mean over anchors of the leading correct drafts, and the bonus token.

    Not what decoding reaches: it begins blocks where drafts were wrong more often than elsewhere.

    Args:
        by_position: Sums as in `DraftLoss.by_position`, added over as many batches as wanted.
    """
    run, reach = by_position[4, 1:], by_position[5, 1:]
    return 1.0 + float((run / reach.clamp(min=1)).sum())


def decoding_rounds(correct_NK: Tensor, batch: DraftBatch) -> int:
    """Return in how many verifications greedy decoding would commit a batch's very texts.

    The first token of a supervised run comes from the forward before it. From there a block
    commits its leading correct drafts and the bonus token, and the next one begins at the last of
    them. Every anchor is one more token to commit, so ``num_anchors / rounds`` is the acceptance
    length, and both add over batches and ranks.

    Args:
        correct_NK: As in `DraftLoss`.
        batch: The micro-batch, with an anchor at every eligible position.
    """
    accepted_N = correct_NK[:, 1:].long().cumprod(1).sum(1).tolist()
    places_2N = torch.stack([batch.anchor_documents_N, batch.anchor_positions_N]).cpu()
    document_N, step_N = places_2N.diff(dim=1)
    starts = (torch.nonzero((document_N != 0) | (step_N != 1)).flatten() + 1).tolist()
    rounds = 0
    for anchor, end in pairwise([0, *starts, len(accepted_N)]):
        while anchor < end:
            anchor += accepted_N[anchor] + 1
            rounds += 1
    return rounds


def decay_gamma(block_size: int, config: LossConfig) -> float:
    """Return the decay length of slot weights: as set, or as published for the block size."""
    if config.gamma is not None:
        return config.gamma
    return block_size / 2 if block_size <= 10 else 5 + (block_size - 10) / 3


def draft_hidden(
    model: DraftModel,
    embedding_VD: Tensor,
    features_MF: Tensor,
    batch: DraftBatch,
    attend: Attend | None = None,
) -> Tensor:
    """Return the hidden states of all blocks, shape (N, K, D).

    Args:
        model: The drafter.
        embedding_VD: The target's embedding rows.
        features_MF: Captured target features of the batch's kept tokens.
        batch: The micro-batch, with at least one anchor.
        attend: Attention over context and block; sliced SDPA when not given.
    """
    slots_K = torch.arange(model.spec.block_size, device=batch.labels_NK.device)
    return model(
        model.noise(batch.labels_NK[:, 0], embedding_VD),
        batch.anchor_positions_N[:, None] + slots_K,
        model.context(features_MF.to(model.fc.weight.dtype), batch.context_positions_M),
        attend or SlicedAttention(batch, model.spec),
    )


def draft_loss(
    model: DraftModel,
    features_MF: Tensor,
    batch: DraftBatch,
    config: LossConfig,
    *,
    embedding_VD: Tensor,
    head_VD: Tensor,
) -> DraftLoss:
    """Run the drafter on a micro-batch and sum its loss.

    Args:
        model: The drafter.
        features_MF: Captured target features of the batch's kept tokens; for distillation what
            the target's head reads stands behind them, D more columns.
        batch: The micro-batch; without anchors the loss is 0 and reaches no parameter.
        config: Kind of loss and its constants.
        embedding_VD: The target's embedding rows.
        head_VD: The target's head; a reduced draft vocabulary reads its own rows of it.

    Raises:
        ConfigError: Features of another width than the loss needs, or FlexAttention on a CPU.
    """
    width, extra = model.spec.feature_size, config.distils * model.spec.hidden_size
    if features_MF.shape[1] != width + extra:
        raise ConfigError(
            f"features are {features_MF.shape[1]} wide and loss.kind '{config.kind}' needs {width} "
            f"of the captured layers and {extra} of the final hidden state; set loss.kind to what "
            "the features were captured for"
        )
    if config.attention == "flex" and not features_MF.is_cuda:
        raise ConfigError(
            "loss.attention 'flex' has no gradient on a CPU; set loss.attention to 'sliced'"
        )
    if batch.num_anchors == 0:
        return _nothing(batch)
    attend = FlexAttention(batch, model.spec) if config.attention == "flex" else None
    hidden_NKD = draft_hidden(model, embedding_VD, features_MF[:, :width], batch, attend)
    teacher_NKD = _teacher(batch, features_MF[:, width:]) if config.distils else None
    labels_NK, scored_NK = _draft_labels(model, batch)
    outputs: Any = _ChunkedLoss.apply(
        hidden_NKD, head_VD, teacher_NKD, labels_NK, scored_NK, model, config
    )
    loss_sum, weight_NK, loss_NK, correct_NK = outputs
    return DraftLoss(loss_sum, weight_NK, loss_NK, correct_NK, scored_NK, batch.valid_NK)


def dpace_weights(probability_NK: Tensor, scored_NK: Tensor, alpha: float) -> Tensor:
    """Return D-PACE weights, shape (N, K); a slot that is not scored ends the block before it."""
    smooth = ((1 - alpha) * probability_NK + alpha) * scored_NK
    survival = smooth[:, 1:].cumprod(1)
    return F.pad(survival.flip(1).cumsum(1).flip(1), (1, 0))


def _draft_labels(model: DraftModel, batch: DraftBatch) -> tuple[Tensor, Tensor]:
    """Return labels as rows of the drafter's head, and the slots whose label it has."""
    ids = model.draft_token_ids
    if ids is None:
        return batch.labels_NK, batch.valid_NK
    rows = torch.searchsorted(ids, batch.labels_NK).clamp(max=len(ids) - 1)
    return rows, batch.valid_NK & (ids[rows] == batch.labels_NK)


def _teacher(batch: DraftBatch, final_hidden_MD: Tensor) -> Tensor:
    """Return what the target's head reads to predict each slot, shape (N, K, D)."""
    anchors_N = batch.context_starts_N + batch.anchor_positions_N
    before_K = torch.arange(-1, batch.labels_NK.shape[1] - 1, device=anchors_N.device)
    index_NK = torch.where(batch.valid_NK, anchors_N[:, None] + before_K, anchors_N[:, None])
    return final_hidden_MD[index_NK]


def _nothing(batch: DraftBatch) -> DraftLoss:
    # A leaf of its own: a drafter whose weights are spread over ranks is not run by one of them.
    device = batch.valid_NK.device
    zero = torch.zeros((), dtype=torch.float64, device=device, requires_grad=True)
    empty = torch.zeros(batch.valid_NK.shape, device=device)
    return DraftLoss(zero, empty, empty, empty.bool(), empty.bool(), empty.bool())


class _ChunkedLoss(torch.autograd.Function):
    """Loss sum with its gradient for the hidden states, a chunk of anchors at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NKD: Tensor,
        target_head_UD: Tensor,
        teacher_NKD: Tensor | None,
        labels_NK: Tensor,
        scored_NK: Tensor,
        model: DraftModel,
        config: LossConfig,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ids, head_VD = model.draft_token_ids, model.head_weight(target_head_UD)
        dtype = torch.float64 if hidden_NKD.dtype == torch.float64 else torch.float32
        weight = _decay(model.spec.block_size, config, scored_NK, dtype)
        loss, correct = torch.zeros_like(weight), torch.zeros_like(scored_NK)
        gradient = torch.zeros_like(hidden_NKD)
        for start in range(0, len(hidden_NKD), config.chunk_anchors):
            rows = slice(start, start + config.chunk_anchors)
            scored = scored_NK[rows]
            labels_P = labels_NK[rows][scored]
            logits_PV = _logits(model, hidden_NKD[rows][scored], head_VD)
            top_P, best_P = logits_PV.max(-1)
            soft_PV, right_P = None, best_P == labels_P
            if teacher_NKD is not None:
                said_PU = _logits(model, teacher_NKD[rows][scored], target_head_UD)
                right_P = (best_P if ids is None else ids[best_P]) == said_PU.argmax(-1)
                soft_PV = (said_PU if ids is None else said_PU[:, ids]).softmax(-1)
            correct[rows] = correct[rows].masked_scatter(scored, right_P)
            score_P = _label_score(logits_PV, labels_P, soft_PV)
            cap_slope_PV = _cap_slope(model, logits_PV)
            # From here on the logits' memory holds unnormalised chances, then the gradient.
            chance_PV = logits_PV.sub_(top_P[:, None]).exp_()
            mass_P = chance_PV.sum(-1)
            loss[rows] = loss[rows].masked_scatter(scored, top_P + mass_P.log() - score_P)
            if config.kind == "dpace":
                weight[rows] = dpace_weights(torch.exp(-loss[rows]), scored, config.dpace_alpha)
            if ctx.needs_input_grad[0]:
                factor_P = weight[rows][scored] * model.spec.output_multiplier
                slope_PV = chance_PV.mul_((factor_P / mass_P)[:, None])
                _subtract_labels(slope_PV, factor_P, labels_P, soft_PV)
                if cap_slope_PV is not None:
                    slope_PV *= cap_slope_PV
                gradient_PD = (slope_PV.to(head_VD.dtype) @ head_VD).to(gradient.dtype)
                gradient[rows] = gradient[rows].masked_scatter(scored[..., None], gradient_PD)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(weight, loss, correct)
        return (weight.double() * loss.double()).sum(), weight, loss, correct

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0].to(gradient.dtype), *(None,) * 6


def _decay(block_size: int, config: LossConfig, scored_NK: Tensor, dtype: torch.dtype) -> Tensor:
    slots_K = torch.arange(block_size, device=scored_NK.device)
    return torch.exp(-(slots_K - 1) / decay_gamma(block_size, config)).to(dtype) * scored_NK


def _logits(model: DraftModel, hidden_PD: Tensor, head_VD: Tensor) -> Tensor:
    logits_PV = model.scale_logits(F.linear(hidden_PD.to(head_VD.dtype), head_VD))
    return logits_PV.float() if logits_PV.dtype.itemsize < 4 else logits_PV


def _label_score(logits_PV: Tensor, labels_P: Tensor, soft_PV: Tensor | None) -> Tensor:
    """Return what the loss subtracts from logsumexp: cross-entropy's, or forward KL's."""
    if soft_PV is None:
        return logits_PV.gather(1, labels_P[:, None])[:, 0]
    return (soft_PV * logits_PV).sum(-1) + torch.special.entr(soft_PV).sum(-1)


def _cap_slope(model: DraftModel, logits_PV: Tensor) -> Tensor | None:
    cap = model.spec.final_logit_softcapping
    return None if cap is None else 1 - (logits_PV / cap).square()


def _subtract_labels(
    slope_PV: Tensor, factor_P: Tensor, labels_P: Tensor, soft_PV: Tensor | None
) -> None:
    if soft_PV is None:
        slope_PV.scatter_add_(1, labels_P[:, None], -factor_P[:, None])
    else:
        slope_PV -= soft_PV * factor_P[:, None]
