"""The report's arithmetic, and that a difference from the target alone is noticed."""

import numpy as np
import pytest

from dflash_core.decoding import (
    EvaluationConfig,
    Generation,
    Prompt,
    Sampling,
    evaluate_drafter,
    generate,
)
from dflash_core.decoding.acceptance import held_against_plain
from dflash_core.errors import DataError, DraftError
from tests.dflash_core.draft.parts import MASK, small_drafter, small_target


@pytest.fixture(scope="module")
def target():
    return small_target()


@pytest.fixture(scope="module")
def drafter(target):
    return small_drafter(target)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(11)
    lengths, domains = (5, 70, 12, 9), ("code", "chat", "code", "chat")
    return [
        Prompt(rng.integers(2, MASK, n), domain) for n, domain in zip(lengths, domains, strict=True)
    ]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_report_adds_up_and_greedy_output_is_exact(target, drafter, prompts, batch_size):
    config = EvaluationConfig(max_new_tokens=20, batch_size=batch_size)
    report = evaluate_drafter(target, drafter, prompts, config)
    overall = report.overall
    assert overall.num_prompts == 4
    assert sum(report.histogram) == overall.num_verifications
    committed = sum(n * count for n, count in enumerate(report.histogram, start=1))
    assert committed == overall.num_tokens - overall.num_prompts
    assert overall.tau == pytest.approx(committed / overall.num_verifications)
    assert set(report.by_domain) == {"code", "chat"}
    assert {k: g.num_prompts for k, g in report.by_prompt_length.items()} == {
        "<= 64": 3,
        "<= 256": 1,
    }
    assert report.exactness is not None
    assert report.exactness.num_faults == 0
    assert report.exactness.num_identical + report.exactness.num_ties == 4
    assert type(report).model_validate_json(report.model_dump_json()) == report


def test_a_text_that_is_not_the_targets_own_is_a_fault(target, prompts):
    """The comparison itself: a wrong token in one text is found, with the gap where it parts."""
    (text,) = generate(target, [prompts[0].token_ids], max_new_tokens=8)
    wrong = text.copy()
    wrong[3] = (wrong[3] + 1) % MASK
    drafted = {0: Generation(wrong, (7,))}
    found = held_against_plain(target, prompts, EvaluationConfig(), drafted, {0: text})
    assert (found.num_identical, found.num_ties, found.num_faults) == (0, 0, 1)
    assert found.largest_gap > found.tie_gap


def test_no_prompt_is_refused(target, drafter):
    with pytest.raises(DataError, match="no prompt"):
        evaluate_drafter(target, drafter, [], EvaluationConfig())


def test_another_target_is_refused(drafter, prompts):
    wide = small_target(hidden_size=64)
    with pytest.raises(DraftError, match="hidden size 32 but the target has 64"):
        evaluate_drafter(wide, drafter, prompts, EvaluationConfig())


def test_sampled_evaluation_has_no_exactness(target, drafter, prompts):
    config = EvaluationConfig(max_new_tokens=8, sampling=Sampling(temperature=1.0))
    report = evaluate_drafter(target, drafter, prompts, config)
    assert report.exactness is None
    assert report.speedup is not None
