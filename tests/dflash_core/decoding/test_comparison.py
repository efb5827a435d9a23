"""The paired bootstrap: sure of what is plain, unsure of what is chance."""

import numpy as np
import pytest

from dflash_core.decoding import AcceptanceGroup, AcceptanceReport, compare_acceptance
from dflash_core.errors import DataError


def report(pairs: list[tuple[int, int]]) -> AcceptanceReport:
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
        batch_size=1,
        temperature=0.0,
        dtype="float32",
        speculative_tokens_per_s=1.0,
    )


def test_a_drafter_is_no_better_than_itself() -> None:
    same = report([(20, 10), (30, 10), (12, 8)])
    gain = compare_acceptance(same, same)
    assert (gain.gain, gain.low, gain.high) == (0, 0, 0)
    assert not gain.is_better_by(0)


def test_a_plain_gain_on_every_prompt_is_sure() -> None:
    champion = report([(20, 10), (30, 15), (16, 8), (24, 12)])
    challenger = report([(30, 10), (45, 15), (24, 8), (36, 12)])
    gain = compare_acceptance(challenger, champion)
    assert gain.gain == pytest.approx(1.0)
    assert gain.is_better_by(0.5) and not gain.is_better_by(1.1)


def test_one_lucky_prompt_is_not_enough() -> None:
    champion = report([(20, 10)] * 8)
    challenger = report([(80, 10), *[(19, 10)] * 7])
    gain = compare_acceptance(challenger, champion)
    assert gain.gain > 0.5 and gain.low < 0


def test_other_prompts_cannot_be_compared() -> None:
    with pytest.raises(DataError, match="2 prompts cannot be compared with acceptance on 1"):
        compare_acceptance(report([(4, 2), (4, 2)]), report([(4, 2)]))
