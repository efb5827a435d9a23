"""The whole loop at once: trained on the target's own texts, a drafter drafts them."""

import math

import numpy as np
import pytest
import torch

from dflash_core.corpus.store import Sample
from dflash_core.decoding.acceptance import evaluate_drafter
from dflash_core.decoding.config import EvaluationConfig
from dflash_core.decoding.plain import generate
from dflash_core.decoding.prompts import Prompt
from dflash_core.draft.batch import collate
from dflash_core.draft.build import build_drafter
from dflash_core.draft.config import DraftConfig, LossConfig
from dflash_core.draft.loss import draft_loss
from dflash_core.planning.anchors import AnchorConfig
from tests.dflash_core.draft.parts import VOCABULARY, small_target

BLOCK = 8
NEW_TOKENS = 72
NUM_STEPS = 160


@pytest.fixture(scope="module")
def target():
    widths = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128}
    return small_target(layer_ids=(0, 1, 2), initializer_range=0.15, **widths)


@pytest.fixture(scope="module")
def texts(target):
    return varied_texts(target)


def varied_texts(target):
    """Eight greedy texts of the target that are no loops: the prompts and what follows them."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, VOCABULARY, 8) for _ in range(24)]
    answers = generate(target, prompts, max_new_tokens=NEW_TOKENS, batch_size=24, stop_token_ids=())
    varied = [row for row, answer in enumerate(answers) if distinct_share(answer) >= 0.5][:8]
    assert len(varied) == 8
    return [prompts[row] for row in varied], [answers[row] for row in varied]


def distinct_share(text):
    """Share of the 4-grams of a text that are distinct."""
    return len({tuple(text[i : i + 4]) for i in range(len(text) - 3)}) / (len(text) - 3)


def mask_token(texts):
    """An id that occurs nowhere in the texts."""
    used = set(np.concatenate([np.concatenate(part) for part in texts]).tolist())
    return max(set(range(VOCABULARY)) - used)


def train(target, texts, *, num_steps=NUM_STEPS, **shape):
    samples = [
        Sample(
            np.concatenate([prompt, answer]).astype(np.int32),
            np.arange(len(prompt) + NEW_TOKENS) >= len(prompt),
            "test",
            f"text-{number}",
        )
        for number, (prompt, answer) in enumerate(zip(*texts, strict=True))
    ]
    shape = {"num_layers": 2, "block_size": BLOCK, "mask_token_id": mask_token(texts)} | shape
    config = DraftConfig(**shape)
    model = build_drafter(config, target, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    losses, features = [], None
    for step in range(num_steps):
        batch = collate(
            [[sample] for sample in samples],
            padded_length=80,
            block_size=BLOCK,
            mask_token_id=model.spec.mask_token_id,
            anchors=AnchorConfig(),
            seed=0,
            epoch=step,
        )
        if features is None:
            states = target.model(input_ids=batch.input_ids_BT, output_hidden_states=True)
            layers = [states.hidden_states[layer + 1] for layer in target.layer_ids]
            features = torch.cat(layers, dim=-1)
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, (step + 1) / 20, (num_steps - step) / 40)
        loss = draft_loss(
            model,
            features.flatten(0, 1)[batch.context_index_M],
            batch,
            LossConfig(),
            embedding_VD=target.input_embeddings.weight,
            head_VD=target.lm_head.weight,
        )
        mean = loss.loss_sum / loss.weight_sum
        optimizer.zero_grad()
        mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(mean.detach()))
    return model.eval(), losses


def test_an_overfitted_drafter_drafts_whole_blocks_and_needs_its_context(target, texts):
    drafter, losses = train(target, texts)
    assert losses[0] < math.log(VOCABULARY) + 1.5
    prompts = [Prompt(prompt) for prompt in texts[0]]
    config = EvaluationConfig(max_new_tokens=NEW_TOKENS, batch_sizes=(8,))
    report = evaluate_drafter(target, drafter, prompts, config)
    assert report.exactness is not None
    assert report.exactness.num_faults == 0
    assert report.tau > 0.9 * BLOCK
    with torch.no_grad():
        drafter.fc.weight.zero_()
    blind = evaluate_drafter(target, drafter, prompts, config)
    assert blind.tau < report.tau / 2
