"""Plain and speculative decoding against the target run without any cache."""

import numpy as np
import pytest
import torch

from dflash_core.decoding.plain import generate
from dflash_core.decoding.speculative import speculative_generate
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
            logits = target.model(input_ids=torch.tensor([ids])).logits[0, -1]
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
