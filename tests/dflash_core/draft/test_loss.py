"""The loss against a plain double-precision version, and its sums over batches."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from dflash_core.draft.config import LossConfig
from dflash_core.draft.loss import (
    DraftLoss,
    acceptance_at_anchors,
    decay_gamma,
    decoding_rounds,
    draft_hidden,
    draft_loss,
)
from dflash_core.errors import ConfigError
from tests.dflash_core.draft.parts import (
    VOCABULARY,
    batch_of,
    document,
    kept,
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
    batch = batch_of(rows, distils=config.distils, **settings)
    features = random_features(batch, model.spec, dtype=model.fc.weight.dtype)
    final = torch.randn(
        *features.shape[:2], model.spec.hidden_size, generator=torch.Generator().manual_seed(2)
    ).to(features.dtype)
    given = torch.cat([features, final], dim=-1) if config.distils else features
    loss = draft_loss(model, kept(batch, given), batch, config, **weights(target))
    return loss, batch, features, final


def plain_loss(model, target, batch, features, final, config):
    """The loss slot by slot, from logits that are all kept, with autograd's own gradient."""
    given = weights(target)
    hidden = draft_hidden(model, given["embedding_VD"], kept(batch, features), batch)
    head = model.head_weight(given["head_VD"])
    logits = model.scale_logits(hidden @ head.T)
    ids = model.draft_token_ids
    ids = list(range(VOCABULARY)) if ids is None else ids.tolist()
    gamma = {4: 2.0, 8: 4.0, 10: 5.0, 16: 7.0}[model.spec.block_size]
    total = torch.zeros((), dtype=torch.float64)
    for n in range(batch.num_anchors):
        valid = [k for k in range(logits.shape[1]) if batch.valid_NK[n, k]]
        valid = [k for k in valid if batch.labels_NK[n, k] in ids]
        label = {k: torch.tensor(ids.index(int(batch.labels_NK[n, k]))) for k in valid}
        if config.kind == "dpace":
            valid = [k for index, k in enumerate(valid) if k == index + 1]
        row, column = int(batch.anchor_rows_N[n]), int(batch.anchor_columns_N[n])
        chance = [logits[n, k].softmax(-1)[label[k]].item() for k in valid]
        smooth = [(1 - config.dpace_alpha) * q + config.dpace_alpha for q in chance]
        for index, k in enumerate(valid):
            if config.kind == "forward_kl":
                soft = model.scale_logits(final[row, column + k - 1] @ head.T)
                term = F.kl_div(
                    logits[n, k].log_softmax(-1),
                    soft.log_softmax(-1),
                    log_target=True,
                    reduction="sum",
                )
            else:
                term = F.cross_entropy(logits[n, k][None], label[k][None])
            weight = math.exp(-(k - 1) / gamma)
            if config.kind == "dpace":
                weight = sum(math.prod(smooth[: m + 1]) for m in range(index, len(valid)))
            total = total + weight * term
    return total


@pytest.mark.parametrize("kind", ["decayed_ce", "dpace", "forward_kl"])
@pytest.mark.parametrize(("cap", "ids"), [(None, None), (5.0, None), (None, np.arange(0, 96, 3))])
def test_loss_and_gradient_equal_the_plain_version(kind, cap, ids):
    """With every third token only, a block of D-PACE ends at the first that is not proposable."""
    target = small_target()
    target.model.config.final_logit_softcapping = cap
    reduced = {} if ids is None else {"draft_vocab_size": len(ids), "draft_token_ids": ids}
    model = small_drafter(target, double=True, **reduced)
    config = LossConfig(kind=kind, chunk_anchors=3)
    loss, batch, features, final = run(model, target, ROWS, config)
    plain = plain_loss(model, target, batch, features, final, config)
    # Both in float64: only the order of sums differs, and the decay is drawn in float32.
    torch.testing.assert_close(loss.loss_sum, plain, rtol=1e-6, atol=1e-9)
    ours = torch.autograd.grad(loss.loss_sum, list(model.parameters()))
    theirs = torch.autograd.grad(plain, list(model.parameters()))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def gradients(model, loss):
    return torch.autograd.grad(loss.loss_sum, list(model.parameters()))


@pytest.mark.parametrize("packed", [False, True])
def test_two_samples_together_are_the_sum_of_the_two_apart(packed):
    """In float64, whatever row, padding or order they come in: only sums are reordered."""
    target = small_target()
    model = small_drafter(target, double=True)
    first, second = document(40, seed=1), document(23, seed=3)
    rows = [[first, second]] if packed else [[second], [first]]
    together, *_ = run(model, target, rows, padded_length=90)
    apart = [run(model, target, [[sample]])[0] for sample in (first, second)]
    torch.testing.assert_close(together.loss_sum, apart[0].loss_sum + apart[1].loss_sum)
    torch.testing.assert_close(together.by_position, apart[0].by_position + apart[1].by_position)
    pairs = zip(*(gradients(model, loss) for loss in (together, *apart)), strict=True)
    for whole, one, other in pairs:
        torch.testing.assert_close(whole, one + other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("packed", [False, True])
def test_no_token_from_the_anchor_on_reaches_its_block(seed, packed):
    """Change a document's tokens from an anchor on: blocks there and before keep their logits.

    The anchor's own embedding is the one legal way in, so of the anchor only the hidden state is
    changed, and of all after it the tokens, from which follow features and labels.
    """
    target = small_target()
    model = small_drafter(target)
    other, sample = document(31, seed=50 + seed), document(45, seed=seed)
    embedding = target.input_embeddings.weight

    def run_with(sample):
        batch = batch_of([[other, sample]] if packed else [[other], [sample]])
        return batch, random_features(batch, model.spec)

    batch, features = run_with(sample)
    before = draft_hidden(model, embedding, kept(batch, features), batch)
    chosen = batch.num_anchors - 1 - seed
    row, column = int(batch.anchor_rows_N[chosen]), int(batch.anchor_columns_N[chosen])
    after_anchor = np.arange(45) > int(batch.anchor_positions_N[chosen])
    changed = document(45, seed=99).input_ids
    ids = np.where(after_anchor, changed, sample.input_ids).astype(np.int32)
    batch, disturbed = run_with(replace(sample, input_ids=ids))
    disturbed[row, column] += 7 * torch.randn_like(disturbed[row, column])
    after = draft_hidden(model, embedding, kept(batch, disturbed), batch)
    same_row = batch.anchor_rows_N == row
    untouched = ~same_row | (batch.anchor_columns_N <= column)
    torch.testing.assert_close(after[untouched], before[untouched], rtol=0, atol=0)
    later = same_row & (batch.anchor_columns_N > column)
    assert not later.any() or not torch.allclose(after[later], before[later])


def test_a_batch_without_anchors_has_a_zero_loss_and_no_gradient():
    target = small_target()
    model = small_drafter(target)
    batch = batch_of([[document(9, prompt=9)]])
    features = kept(batch, random_features(batch, model.spec))
    loss = draft_loss(model, features, batch, CHUNKED, **weights(target, double=False))
    assert (float(loss.loss_sum.detach()), float(loss.weight_sum)) == (0.0, 0.0)
    assert float(loss.by_position.sum()) == 0.0
    loss.loss_sum.backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_reduced_vocabulary_scores_what_it_has_and_counts_the_rest_as_wrong():
    target = small_target()
    ids = np.arange(0, VOCABULARY, 2)
    model = small_drafter(target, draft_vocab_size=len(ids), draft_token_ids=ids)
    loss, batch, *_ = run(model.double(), target, ROWS)
    even = (batch.labels_NK % 2 == 0) & batch.valid_NK
    assert torch.equal(loss.scored_NK, even)
    assert torch.equal(loss.valid_NK, batch.valid_NK)
    assert not loss.correct_NK[~even].any()
    assert float(loss.weight_NK[~even].sum()) == 0.0


def test_the_whole_vocabulary_as_a_reduced_one_changes_nothing():
    target = small_target()
    reduced = small_drafter(
        target, double=True, draft_vocab_size=VOCABULARY, draft_token_ids=np.arange(VOCABULARY)
    )
    full = small_drafter(target, double=True)
    full.load_state_dict(reduced.state_dict())
    one, other = (run(model, target, ROWS)[0] for model in (reduced, full))
    assert torch.equal(one.loss_sum, other.loss_sum)


@pytest.mark.parametrize("seed", range(3))
def test_rounds_are_those_of_decoding_the_very_same_texts(seed):
    """Walked token by token, over two documents of one row, the second with a gap."""
    samples = [document(33, seed=seed), document(50, seed=seed, gaps=(20, 21))]
    batch = batch_of([samples], anchors_per_supervised_token=1.0)
    correct = torch.rand(batch.labels_NK.shape, generator=torch.Generator().manual_seed(seed)) < 0.7
    correct &= batch.valid_NK
    places = zip(batch.anchor_documents_N.tolist(), batch.anchor_positions_N.tolist(), strict=True)
    block_at = dict(zip(places, correct.tolist(), strict=True))
    rounds = 0
    for number, sample in enumerate(samples):
        written = 0
        for position in range(len(sample.input_ids)):
            if not sample.loss_mask[position]:
                written = 0  # a run's first token is the target's own
            elif (number, position) in block_at and position >= written:
                drafts = [*block_at[number, position][1:], False]
                written = position + drafts.index(False) + 1
                rounds += 1
    assert decoding_rounds(correct, batch) == rounds


def test_distillation_is_right_where_the_draft_is_what_the_target_would_say():
    """Of its whole vocabulary, also where the drafter has every other token only."""
    target, ids = small_target(), np.arange(0, VOCABULARY, 2)
    model = small_drafter(target, double=True, draft_vocab_size=len(ids), draft_token_ids=ids)
    config = LossConfig(kind="forward_kl", chunk_anchors=3)
    loss, batch, features, final = run(model, target, ROWS, config)
    given = weights(target)
    hidden = draft_hidden(model, given["embedding_VD"], kept(batch, features), batch)
    drafts = torch.from_numpy(ids)[(hidden @ model.head_weight(given["head_VD"]).T).argmax(-1)]
    slots = batch.anchor_columns_N[:, None] + torch.arange(-1, 3)
    rows = batch.anchor_rows_N[:, None].expand_as(slots)
    said = (final[rows, slots.clamp(0, final.shape[1] - 1)] @ given["head_VD"].T).argmax(-1)
    assert torch.equal(loss.correct_NK, (drafts == said) & loss.scored_NK)


def test_acceptance_at_anchors_is_the_mean_leading_run_with_the_bonus():
    """Blocks of 4: all right; right, wrong, right; cut after two slots, both right."""
    correct = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 1], [0, 1, 1, 0]]).bool()
    valid = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 0]]).bool()
    zeros = torch.zeros(3, 4)
    loss = DraftLoss(zeros.sum(), zeros, zeros, correct, valid, valid)
    # Reached: 3 blocks at slot 1, 3 at slot 2, 2 at slot 3; run: 3, 2, 1.
    assert acceptance_at_anchors(loss.by_position) == pytest.approx(1 + 3 / 3 + 2 / 3 + 1 / 2)


def test_distillation_without_final_hidden_states_is_refused():
    target = small_target()
    model = small_drafter(target)
    batch = batch_of(ROWS)
    features = kept(batch, random_features(batch, model.spec))
    with pytest.raises(ConfigError, match="are 64 wide and loss"):
        config = LossConfig(kind="forward_kl")
        draft_loss(model, features, batch, config, **weights(target, double=False))


@pytest.mark.parametrize(("block_size", "gamma"), [(8, 4), (10, 5), (16, 7)])
def test_decay_is_the_published_one(block_size, gamma):
    assert decay_gamma(block_size, LossConfig()) == pytest.approx(gamma)


def test_bfloat16_products_stay_near_float32():
    """Autocast as training uses it: 8 bits of mantissa in every product, sums in float32."""
    target = small_target()
    model = small_drafter(target)
    batch = batch_of(ROWS)
    features = kept(batch, random_features(batch, model.spec))
    given = (model, features, batch, CHUNKED)
    exact = draft_loss(*given, **weights(target, double=False))
    with torch.autocast("cpu", torch.bfloat16):
        rough = draft_loss(*given, **weights(target, double=False))
    torch.testing.assert_close(rough.loss_sum, exact.loss_sum, rtol=0.02, atol=0.0)
    for ours, theirs in zip(gradients(model, rough), gradients(model, exact), strict=True):
        assert float((ours - theirs).norm()) < 0.1 * float(theirs.norm()) + 1e-3
