"""Against the authors' own package, in both directions; skipped where it is not installed."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_core.decoding.plain import generate
from dflash_core.decoding.speculative import speculative_generate
from dflash_core.export.write import export_drafter
from dflash_core.export.zlab import load_drafter
from dflash_core.target.config import TargetConfig
from dflash_core.target.loading import load_target
from tests.dflash_core.draft import test_overfit
from tests.dflash_core.draft.parts import MASK, small_drafter, small_target

ROOT = Path(__file__).resolve().parents[3]

reference = pytest.importorskip("dflash.model", reason="the authors' package is not installed")
from tests.dflash_core.export import decoders  # noqa: E402  (needs the package)

WINDOWED = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 12}


@pytest.fixture(scope="module")
def target():
    return small_target()


@pytest.fixture(scope="module", params=[{}, WINDOWED], ids=["full", "sliding"])
def pair(request, target, tmp_path_factory):
    """Our drafter and the authors' class, loaded from our export."""
    ours = small_drafter(target, **request.param).eval()
    folder = export_drafter(ours, tmp_path_factory.mktemp("drafter"), dtype=torch.float32)
    theirs, info = reference.DFlashDraftModel.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return ours, theirs.eval(), folder


def prompts():
    rng = np.random.default_rng(5)
    return [rng.integers(2, MASK, length) for length in (6, 20, 33)]


def test_forward_equals_the_reference(pair, target):
    """One block after a context: 1e-4 in float32, from another order of sums and norms."""
    ours, theirs, _ = pair
    context = torch.randn(1, 15, ours.spec.feature_size, generator=torch.Generator().manual_seed(1))
    noise = ours.noise(torch.tensor([7]), target.input_embeddings.weight)
    positions = torch.arange(15 + ours.spec.block_size)
    with torch.inference_mode():
        expected = theirs(
            position_ids=positions[None], noise_embedding=noise, target_hidden=context
        )
        found = _one_block(ours, context[0], noise, positions)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def _one_block(model, features, noise, positions):
    """Run our model with plain attention over every key, masked as the definition says."""
    num_context = len(features)

    def attend(query, own, context, layer):
        key = torch.cat([context[0], own[0][0]]).transpose(0, 1)[None]
        value = torch.cat([context[1], own[1][0]]).transpose(0, 1)[None]
        place, at = positions[num_context:, None], positions[None, :]
        seen = torch.ones(len(place), at.shape[1], dtype=torch.bool)
        if model.spec.causal(layer):
            seen &= at <= place
        if model.spec.window(layer) is not None:
            seen &= place - at < model.spec.window(layer)
        out = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2), key, value, attn_mask=seen, enable_gqa=True
        )
        return out.transpose(1, 2)

    context = model.context(features, positions[:num_context])
    return model(noise, positions[None, num_context:], context, attend)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_generation_loop_equals_the_reference(pair, target):
    """The same text in the same number of target forwards."""
    ours, theirs, _ = pair
    for prompt in prompts():
        found = decoders.by_ours(target, ours, prompt, 20)
        assert decoders.by_authors(target, theirs, prompt, 20) == found


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_three_decoders_agree_on_a_drafter_that_knows_its_texts(tmp_path):
    """A window of 7 that is wide by one, or causal, would be accepted otherwise."""
    widths = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128}
    target = small_target(layer_ids=(0, 1, 2), initializer_range=0.15, **widths)
    texts = test_overfit.varied_texts(target)
    shape = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 7}
    ours, _ = test_overfit.train(target, texts, num_steps=90, is_causal=False, **shape)
    assert decoders.three_agree(target, ours, texts[0][:4], tmp_path) > 4


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_three_decoders_agree_on_the_demo_target(tmp_path):
    path = ROOT / "configs" / "demo_target"
    target = load_target(TargetConfig(path=path, layer_ids=(0, 2, 4)))
    chats = ["def area(width, height):", "class Queue:", "import os", "# Sort a list"]
    prompts = [np.array(target.tokenizer(chat)["input_ids"][:8]) for chat in chats]
    answers = generate(target, prompts, max_new_tokens=72, batch_size=4, stop_token_ids=())
    ours, _ = test_overfit.train(target, (prompts, answers), num_steps=60)
    assert decoders.three_agree(target, ours, prompts, tmp_path) > 2


def test_a_checkpoint_of_the_reference_loads_into_ours(pair, target, tmp_path):
    """Written by the authors' class, read strictly by ours: the same texts again."""
    ours, theirs, _ = pair
    theirs.save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path)
    assert loaded.spec == ours.spec
    given = speculative_generate(target, loaded, prompts(), max_new_tokens=20)
    expected = speculative_generate(target, ours, prompts(), max_new_tokens=20)
    assert [g.token_ids.tolist() for g in given] == [e.token_ids.tolist() for e in expected]
    assert [g.acceptance_lengths for g in given] == [e.acceptance_lengths for e in expected]
