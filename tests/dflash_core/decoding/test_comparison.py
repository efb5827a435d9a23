"""The paired bootstrap: sure of what is plain, unsure of what is chance."""

import numpy as np
import pytest

from dflash_core.decoding.comparison import compare_drafters
from dflash_core.decoding.report import AcceptanceGroup, AcceptanceReport, BatchTime, speed_facts
from dflash_core.errors import DataError


def report(pairs: list[tuple[int, int]], times: list[tuple[float, float]] = ()) -> AcceptanceReport:
    """A report of prompts, and of seconds with and without the drafter for 10 tokens each."""
    tokens, rounds = (sum(column) for column in zip(*pairs, strict=True))
    group = AcceptanceGroup(
        num_prompts=len(pairs),
        num_tokens=tokens,
        num_verifications=rounds,
        tau=tokens / rounds,
        tau_mean=float(np.mean([t / r for t, r in pairs])),
    )
    return AcceptanceReport(
        overall=group,
        per_prompt=tuple(pairs),
        histogram=(1,),
        block_size=4,
        max_new_tokens=8,
        temperature=0.0,
        dtype="float32",
        **speed_facts(1, *([time_of(row[side]) for row in times] for side in (0, 1))),
    )


def time_of(seconds: float) -> BatchTime:
    return BatchTime(num_tokens=10, prompt_s=seconds / 4, decode_s=seconds * 3 / 4)


def test_a_drafter_is_no_better_than_itself() -> None:
    same = report([(20, 10), (30, 10), (12, 8)])
    gain = compare_drafters(same, same)
    assert (gain.gain, gain.low, gain.high) == (0, 0, 0)
    assert not gain.is_better_by(0)


def test_a_plain_gain_on_every_prompt_is_sure() -> None:
    champion = report([(20, 10), (30, 15), (16, 8), (24, 12)])
    challenger = report([(30, 10), (45, 15), (24, 8), (36, 12)])
    gain = compare_drafters(challenger, champion)
    assert gain.gain == pytest.approx(1.0)
    assert gain.is_better_by(0.5) and not gain.is_better_by(1.1)


def test_one_lucky_prompt_is_not_enough() -> None:
    champion = report([(20, 10)] * 8)
    challenger = report([(80, 10), *[(19, 10)] * 7])
    gain = compare_drafters(challenger, champion)
    assert gain.gain > 0.5 and gain.low < 0


def test_other_prompts_cannot_be_compared() -> None:
    with pytest.raises(DataError, match="tau on 2 prompts cannot be compared with tau on 1"):
        compare_drafters(report([(4, 2), (4, 2)]), report([(4, 2)]))


def test_the_faster_is_better_by_speed_even_where_it_accepts_less() -> None:
    """The champion's run met a machine of half the pace: its own plain decoding did too."""
    champion = report([(30, 10)] * 8, [(2.0, 4.0), (2.2, 4.4)] * 4)
    challenger = report([(20, 10)] * 8, [(0.5, 2.0), (0.6, 2.2)] * 4)
    assert champion.speedup == pytest.approx(2)
    assert not compare_drafters(challenger, champion).is_better_by(0)
    gain = compare_drafters(challenger, champion, measure="speedup")
    assert (gain.challenger, gain.champion) == pytest.approx((challenger.speedup, 2))
    assert gain.low <= gain.gain <= gain.high and gain.is_better_by(1.5)


def test_one_fast_batch_is_not_enough() -> None:
    champion = report([(2, 1)] * 8, [(1.0, 1.0)] * 8)
    challenger = report([(2, 1)] * 8, [(0.1, 10.0), *[(1.05, 1.0)] * 7])
    gain = compare_drafters(challenger, champion, measure="speedup")
    assert gain.gain > 1 and gain.low < 0


def test_an_interval_of_one_batch_is_refused() -> None:
    with pytest.raises(DataError, match="timed in 1 full batch of 1 prompts, and an interval"):
        compare_drafters(*[report([(2, 1)], [(1.0, 1.0)])] * 2, measure="speedup")
