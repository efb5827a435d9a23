"""Plain and speculative decoding against the target run without any cache."""

import numpy as np
import pytest
import torch

from dflash_core.decoding.config import Sampling
from dflash_core.decoding.plain import generate
from dflash_core.decoding.sampling import accept_sampled, draw, probabilities
from dflash_core.decoding.speculative import speculative_generate
from dflash_core.errors import DataError, DraftError
from tests.dflash_core.draft.parts import MASK, small_drafter, small_target

NEW_TOKENS = 24


@pytest.fixture(scope="module")
def target():
    return small_target()


@pytest.fixture(scope="module")
def drafter(target):
    return small_drafter(target)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(3)
    return [rng.integers(2, MASK, length) for length in (5, 17, 1, 9, 30)]


def greedy_without_cache(target, prompt, stops=()):
    ids = [int(token) for token in prompt]
    for _ in range(NEW_TOKENS):
        with torch.inference_mode():
            logits = target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(int(logits.argmax()))
        if ids[-1] in stops:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_plain_generation_equals_the_target_without_cache(target, prompts, batch_size):
    texts = generate(target, prompts, max_new_tokens=NEW_TOKENS, batch_size=batch_size)
    for prompt, text in zip(prompts, texts, strict=True):
        assert text.tolist() == greedy_without_cache(target, prompt, stops=(1,))


@pytest.mark.parametrize("batch_size", [1, 3, 5])
def test_speculative_generation_is_the_targets_own_text(target, drafter, prompts, batch_size):
    results = speculative_generate(
        target, drafter, prompts, max_new_tokens=NEW_TOKENS, batch_size=batch_size
    )
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids.tolist() == greedy_without_cache(target, prompt, stops=(1,))
        assert 1 + sum(result.acceptance_lengths) == len(result.token_ids)


def test_a_stop_token_inside_a_run_ends_the_text(target, drafter, prompts):
    """Any token of the plain text as the stop token: both ways of decoding end right after it."""
    for prompt in prompts[:2]:
        plain = greedy_without_cache(target, prompt)
        stop = plain[5]
        expected = plain[: plain.index(stop) + 1]
        settings = {"max_new_tokens": NEW_TOKENS, "stop_token_ids": [stop]}
        (alone,) = generate(target, [prompt], **settings)
        (drafted,) = speculative_generate(target, drafter, [prompt], **settings)
        assert alone.tolist() == drafted.token_ids.tolist() == expected


@pytest.mark.parametrize(
    "overrides",
    [
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6},
        {"is_causal": True},
        {"draft_vocab_size": 40, "draft_token_ids": np.arange(0, 80, 2)},
    ],
    ids=["sliding", "causal", "reduced"],
)
def test_any_shape_of_drafter_leaves_the_targets_text_alone(target, prompts, overrides):
    odd = small_drafter(target, **overrides)
    results = speculative_generate(target, odd, prompts, max_new_tokens=12, batch_size=3)
    plain = generate(target, prompts, max_new_tokens=12)
    assert [r.token_ids.tolist() for r in results] == [text.tolist() for text in plain]


def test_rejection_sampling_keeps_the_targets_distribution():
    """The first committed token, 40,000 times: within 5 standard errors of p everywhere."""
    torch.manual_seed(0)
    p = torch.softmax(torch.randn(1, 3, 6), -1).expand(40_000, -1, -1)
    q = torch.softmax(2 * torch.randn(1, 2, 6), -1).expand(40_000, -1, -1)
    generator = torch.Generator().manual_seed(1)
    drafts = draw(q, generator)
    accepted, bonus = accept_sampled(drafts, p, q, generator)
    first = torch.where(accepted > 0, drafts[:, 0], bonus)
    share = torch.bincount(first, minlength=6) / len(first)
    error = (p[0, 0] * (1 - p[0, 0]) / len(first)).sqrt()
    assert ((share - p[0, 0]).abs() < 5 * error).all()
    overlap = torch.minimum(p[0, 0], q[0, 0]).sum()
    assert float((accepted > 0).float().mean()) == pytest.approx(float(overlap), abs=0.02)


def test_sampled_decoding_is_distributed_as_the_target_alone(target, drafter):
    """Two tokens after one prompt, 600 texts each way: the joint counts differ by chance only."""
    prompt = [5, 6, 7]
    sampling = Sampling(temperature=0.7, top_k=3)
    settings = {"max_new_tokens": 2, "batch_size": 300, "sampling": sampling, "stop_token_ids": ()}
    plain = generate(target, [prompt] * 600, seed=1, **settings)
    drafted = speculative_generate(target, drafter, [prompt] * 600, seed=2, **settings)
    pairs = [[tuple(text) for text in plain], [tuple(r.token_ids) for r in drafted]]
    kinds = sorted(set(pairs[0]) | set(pairs[1]))
    counts = np.array([[side.count(kind) for kind in kinds] for side in pairs])
    pooled = counts.sum(0)
    chi2 = float((((counts - pooled / 2) ** 2) / (pooled / 2)).sum())
    # Nine kinds at most; the 99.9th percentile of chi-squared with 8 degrees is 26.1.
    assert len(kinds) <= 9
    assert chi2 < 26.1


def test_top_p_and_top_k_leave_the_most_likely_tokens():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    kept = probabilities(logits, Sampling(temperature=1.0, top_p=0.7))
    torch.testing.assert_close(kept, torch.tensor([[0.625, 0.375, 0.0, 0.0]]))
    kept = probabilities(logits, Sampling(temperature=1.0, top_k=1))
    torch.testing.assert_close(kept, torch.tensor([[1.0, 0.0, 0.0, 0.0]]))


def test_an_empty_prompt_is_refused(target, drafter):
    with pytest.raises(DataError, match="prompt 1 is empty"):
        generate(target, [[3], []], max_new_tokens=2)


def test_a_drafter_of_another_target_is_refused(drafter):
    with pytest.raises(DraftError, match="vocabulary 97 but the target has 50"):
        speculative_generate(small_target(vocab_size=50), drafter, [[3]], max_new_tokens=2)
