"""The report's arithmetic, and that a difference from the target alone is noticed."""

import numpy as np
import pytest
import torch

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


def test_in_bfloat16_a_difference_is_reported_and_no_fault(prompts):
    """Blocks and single steps round differently there: the share of equal texts is what is said."""
    target = small_target()
    target.model.to(torch.bfloat16)
    drafter = small_drafter(target).to(torch.bfloat16)
    report = evaluate_drafter(target, drafter, prompts, EvaluationConfig(max_new_tokens=20))
    exact = report.exactness
    assert exact is not None
    assert report.dtype == "bfloat16"
    assert exact.identical_share == exact.num_identical / 4
    assert exact.num_identical + exact.num_ties + exact.num_faults == 4
    assert not report.model_copy(
        update={"exactness": exact.model_copy(update={"num_faults": 4})}
    ).has_faults


def test_prompts_over_the_targets_positions_are_left_out_and_counted(drafter, prompts):
    short = small_target(max_position_embeddings=64)
    report = evaluate_drafter(short, drafter, prompts, EvaluationConfig(max_new_tokens=10))
    assert (report.overall.num_prompts, report.num_left_out) == (3, 1)
    with pytest.raises(DataError, match=r"shortest prompt has 70 tokens .* 64 positions"):
        evaluate_drafter(short, drafter, prompts[1:2], EvaluationConfig(max_new_tokens=10))


def test_prompts_of_another_vocabulary_are_refused(target, drafter, prompts):
    given = [prompts[0], Prompt(np.array([5, 97]))]
    with pytest.raises(DataError, match="prompt 1 holds token 97 but the target has 97 tokens"):
        evaluate_drafter(target, drafter, given, EvaluationConfig())


def test_a_reduced_vocabulary_is_measured_as_it_is_served(target, prompts):
    """A drafter for one token proposes it alone, unless a server gives it the whole head."""
    only = int(generate(target, [prompts[0].token_ids], max_new_tokens=2)[0][1])
    ids = np.array([only, 96])
    narrow = small_drafter(target, draft_vocab_size=2, draft_token_ids=np.sort(ids))
    whole = small_drafter(target)
    whole.load_state_dict(narrow.state_dict())
    found = {}
    for name, model, layout in (
        ("reduced", narrow, "speculators"),
        ("expanded", narrow, "zlab"),
        ("whole", whole, "zlab"),
    ):
        config = EvaluationConfig(max_new_tokens=20, served_as=layout)
        report = evaluate_drafter(target, model, prompts, config)
        assert report.exactness is not None
        assert report.exactness.num_faults == 0
        assert report.served_as == layout
        found[name] = report.per_prompt
    assert found["expanded"] == found["whole"] != found["reduced"]


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
