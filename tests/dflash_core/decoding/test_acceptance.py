"""The report's arithmetic, and that a difference from the target alone is noticed."""

import numpy as np
import pytest
import torch

from dflash_core.decoding import timing
from dflash_core.decoding.acceptance import evaluate_drafter, held_against_plain
from dflash_core.decoding.config import EvaluationConfig, Sampling
from dflash_core.decoding.plain import generate
from dflash_core.decoding.prompts import Prompt
from dflash_core.decoding.report import BatchTime, Speed, speed_facts
from dflash_core.decoding.speculative import Generation
from dflash_core.decoding.timing import BothSides
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
    config = EvaluationConfig(max_new_tokens=20, batch_sizes=(batch_size,))
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


def both(drafted, plain):
    return [BothSides(1, drafted={0: Generation(drafted, (7,))}, plain={0: plain})]


def test_a_text_that_is_not_the_targets_own_is_a_fault(target, prompts):
    """The comparison itself: a wrong token in one text is found, with the gap where it parts."""
    (text,) = generate(target, [prompts[0].token_ids], max_new_tokens=8)
    wrong = text.copy()
    wrong[3] = (wrong[3] + 1) % MASK
    found = held_against_plain(target, prompts, both(wrong, text), tie_gap=1e-5)
    assert (found.num_identical, found.num_ties, found.num_faults) == (0, 0, 1)
    assert found.largest_gap > found.tie_gap


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_a_tie_is_relative_to_the_largest_logit(prompts, scale):
    """A model that scales its logits, as Granite and Cohere do, has the same ties."""
    target = small_target()
    (text,) = generate(target, [prompts[0].token_ids], max_new_tokens=4)
    other = text.copy()
    other[2] = (other[2] + 1) % MASK
    gap = held_against_plain(target, prompts, both(other, text), tie_gap=0).largest_gap
    target.lm_head.weight.mul_(scale)
    for tie_gap, num_ties in ((gap * 0.99, 0), (gap * 1.01, 1)):
        assert held_against_plain(target, prompts, both(other, text), tie_gap=tie_gap).num_ties == (
            num_ties
        )


def test_both_sides_decode_the_same_requests_by_turns(target, drafter, prompts, monkeypatch):
    """A warm-up each, then batch by batch, the other side first every time; full batches timed."""
    calls = []

    def listening(name, decode):
        def call(*given, max_new_tokens, **more):
            calls.append((name, len(given[-1]), max_new_tokens))
            return decode(*given, max_new_tokens=max_new_tokens, **more)

        return call

    for name in ("generate", "speculative_generate"):
        decode = getattr(timing, name)
        monkeypatch.setattr(timing, name, listening(name[0], decode))
    config = EvaluationConfig(max_new_tokens=10, batch_sizes=(2, 3, 9))
    report = evaluate_drafter(target, drafter, prompts, config)
    of_two, of_three = calls[:6], calls[6:12]
    assert of_two == [("s", 2, 8), ("g", 2, 8), *[(side, 2, 10) for side in "sggs"]]
    assert of_three[2:] == [("s", 3, 10), ("g", 3, 10), ("g", 1, 10), ("s", 1, 10)]
    assert [speed.batch_size for speed in report.speeds] == [2, 3, 4]
    assert [len(speed.plain_batches) for speed in report.speeds] == [2, 1, 1]
    assert {"speedup", "speedup_at_3", "decode_speedup_at_4"} < set(report.metrics)
    assert report.exactness is not None
    assert report.exactness.num_identical + report.exactness.num_ties == 12


def test_speed_up_is_of_whole_requests_and_of_decoding_alone():
    """Prompts take 1 s on each side; with the drafter 3 more tokens take 1 s, without it 3 s."""
    fast, slow = (BatchTime(num_tokens=4, prompt_s=1, decode_s=s) for s in (1, 3))
    speed = Speed(**speed_facts(1, [fast, fast], [slow, slow]))
    assert (speed.speedup, speed.decode_speedup) == (2, 3)
    assert "slower" not in speed.words
    assert Speed(**speed_facts(1, [slow], [fast])).words.endswith("slower than plain decoding")


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
