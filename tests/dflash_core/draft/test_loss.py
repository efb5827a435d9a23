"""The loss against a plain double-precision version, and its sums over batches."""

import math

import pytest
import torch
from torch.nn import functional as F

from dflash_core.draft import LossConfig, draft_hidden, draft_loss
from tests.dflash_core.draft.parts import (
    batch_of,
    document,
    random_features,
    small_drafter,
    small_target,
)

ROWS = [[document(40, seed=1)], [document(61, seed=3, gaps=(30,))]]


def weights(target, double=True):
    embedding, head = target.input_embeddings.weight, target.lm_head.weight
    kind = torch.float64 if double else torch.float32
    return {"embedding_VD": embedding.to(kind), "head_VD": head.to(kind)}


CHUNKED = LossConfig(chunk_anchors=3)


def run(model, target, rows, config=CHUNKED, **settings):
    batch = batch_of(rows, **settings)
    features = random_features(batch, model.spec, dtype=model.fc.weight.dtype)
    final = torch.randn(
        *features.shape[:2], model.spec.hidden_size, generator=torch.Generator().manual_seed(2)
    ).to(features.dtype)
    loss = draft_loss(model, features, batch, config, final_hidden_BTD=final, **weights(target))
    return loss, batch, features, final


def plain_loss(model, target, batch, features, final, config):
    """The loss slot by slot, from logits that are all kept, with autograd's own gradient."""
    given = weights(target)
    hidden = draft_hidden(model, given["embedding_VD"], features, batch)
    logits = model.scale_logits(hidden @ given["head_VD"].T)
    gamma = {4: 2.0, 8: 4.0, 10: 5.0, 16: 7.0}[model.spec.block_size]
    total = torch.zeros((), dtype=torch.float64)
    for n in range(batch.num_anchors):
        valid = [k for k in range(logits.shape[1]) if batch.valid_NK[n, k]]
        row, column = int(batch.anchor_rows_N[n]), int(batch.anchor_columns_N[n])
        chance = [logits[n, k].softmax(-1)[batch.labels_NK[n, k]].item() for k in valid]
        smooth = [(1 - config.dpace_alpha) * q + config.dpace_alpha for q in chance]
        for index, k in enumerate(valid):
            if config.kind == "forward_kl":
                soft = model.scale_logits(final[row, column + k - 1] @ given["head_VD"].T)
                term = F.kl_div(
                    logits[n, k].log_softmax(-1),
                    soft.log_softmax(-1),
                    log_target=True,
                    reduction="sum",
                )
            else:
                term = F.cross_entropy(logits[n, k][None], batch.labels_NK[n, k][None])
            weight = math.exp(-(k - 1) / gamma)
            if config.kind == "dpace":
                weight = sum(math.prod(smooth[: m + 1]) for m in range(index, len(valid)))
            total = total + weight * term
    return total


@pytest.mark.parametrize("kind", ["decayed_ce", "dpace", "forward_kl"])
@pytest.mark.parametrize("cap", [None, 5.0])
def test_loss_and_gradient_equal_the_plain_version(kind, cap):
    target = small_target()
    target.model.config.final_logit_softcapping = cap
    model = small_drafter(target, double=True)
    config = LossConfig(kind=kind, chunk_anchors=3)
    loss, batch, features, final = run(model, target, ROWS, config)
    plain = plain_loss(model, target, batch, features, final, config)
    # Both in float64: only the order of sums differs, and the decay is drawn in float32.
    torch.testing.assert_close(loss.loss_sum, plain, rtol=1e-6, atol=1e-9)
    ours = torch.autograd.grad(loss.loss_sum, list(model.parameters()))
    theirs = torch.autograd.grad(plain, list(model.parameters()))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
