import pytest

from dflash_core.errors import ConfigError
from dflash_core.throughput import Candidate, GateConfig, Prediction, judge, keep_begun, predict
from tests.dflash_core.throughput.machines import machine, plan

BASE = predict(plan(), machine(), block_size=8)


def forecast(ktok_s, share=0.05) -> Prediction:
    return BASE.model_copy(
        update={"ktok_s": ktok_s, "low": ktok_s * (1 - share), "high": ktok_s * (1 + share)}
    )


def candidate(name="random", ktok_s=11.9, **changes) -> Candidate:
    facts = {
        "name": name,
        "mixing": "diverse",
        "prediction": forecast(ktok_s),
        "padding_efficiency": 0.47,
        "length_eta2": 0.1,
        "step_length_eta2": 0.01,
        "pair_recurrence": 1e-5,
        "straggler_factor": 1.02,
    }
    return Candidate.model_validate(facts | changes)


def only(config, **changes):
    return judge([candidate(**changes)], config).verdicts[0]


def test_a_rejection_says_speed_interval_threshold_and_padding():
    verdict = only(GateConfig(min_ktok_s=20))
    assert not verdict.passed
    assert verdict.reason == (
        "random/diverse: 11.9 Ktok/s predicted (11.3..12.5), threshold 20: rejected; "
        "53% of its slots are padding"
    )


def test_when_nothing_passes_nothing_is_chosen():
    result = judge([candidate(), candidate("sorted", 19.0)], GateConfig(min_ktok_s=30))
    assert result.chosen is None
    assert result.reason == "rejected: none of random/diverse, sorted/diverse passes the gate"


def test_a_relative_threshold_follows_the_fastest():
    config = GateConfig(min_share_of_best=0.9)
    passed = [
        verdict.passed
        for verdict in judge(
            [candidate("sorted", 32), candidate("pooled", 31.6), candidate("random", 11.9)], config
        ).verdicts
    ]
    assert passed == [True, True, False]
    (slow,) = judge([candidate("sorted", 32), candidate()], config).verdicts[1:]
    assert "threshold 28.8 (90% of the fastest): rejected" in slow.reason


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GateConfig(min_padding_efficiency=0.8), "padding efficiency 0.470 under 0.800"),
        (GateConfig(max_step_eta2=0.005), "step eta2 0.010 over 0.005"),
        (GateConfig(max_straggler=1.01), "straggler factor 1.020 over 1.010"),
    ],
)
def test_each_other_threshold_rejects_in_words(config, words):
    verdict = only(config)
    assert not verdict.passed
    assert words in verdict.reason
    assert not verdict.straddles


def test_the_most_diverse_steps_win_whatever_the_speed():
    result = judge([candidate("a", 32, step_length_eta2=0.2), candidate("b", 20)], GateConfig())
    assert result.chosen == 1


@pytest.mark.parametrize(
    ("first", "second", "chosen"),
    [
        ({"length_eta2": 0.9}, {"length_eta2": 0.5, "step_length_eta2": 0.0149}, 1),
        ({"length_eta2": 0.9}, {"length_eta2": 0.5, "step_length_eta2": 0.0151}, 0),
        ({"pair_recurrence": 0.5}, {"pair_recurrence": 0.4}, 1),
        ({"ktok_s": 11.0}, {"ktok_s": 12.0}, 1),
    ],
)
def test_ties_within_5e_3_go_to_micro_batches_then_recurrence_then_speed(first, second, chosen):
    result = judge([candidate(**first), candidate(**second)], GateConfig())
    assert result.chosen == chosen


def test_other_objectives_weigh_speed():
    slow = candidate("slow", 10, step_length_eta2=0.0)
    fast = candidate("fast", 30, step_length_eta2=0.5)
    assert judge([slow, fast], GateConfig(objective="fastest")).chosen == 1
    for weight, chosen in ((0.9, 0), (0.1, 1)):
        config = GateConfig(objective="weighted", diversity_weight=weight)
        assert judge([slow, fast], config).chosen == chosen


def test_an_interval_over_the_threshold_asks_for_a_pilot_which_then_decides():
    config = GateConfig(min_ktok_s=12)
    asked = candidate(ktok_s=11.9)
    first = judge([asked, candidate("sorted", 32)], config)
    assert first.pilots == (0,)
    piloted = asked.model_copy(update={"measured_ktok_s": 12.1})
    second = judge([piloted, candidate("sorted", 32)], config)
    assert second.pilots == ()
    assert second.verdicts[0].passed
    assert "12.1 Ktok/s in a pilot (11.9 predicted)" in second.verdicts[0].reason


def piloted(name, predicted, measured) -> Candidate:
    return candidate(name, predicted, measured_ktok_s=measured)


def test_a_share_of_the_fastest_is_measured_against_measured():
    config = GateConfig(min_share_of_best=0.9)
    first = judge([candidate("pooled", 9.2), candidate("sorted", 10.0)], config)
    assert first.pilots == (0, 1)
    # A machine that is a tenth slower than calibrated is so for both: the share is 92 %.
    second = judge([piloted("pooled", 9.2, 8.28), piloted("sorted", 10.0, 9.0)], config)
    assert second.verdicts[0].passed
    assert second.pilots == ()


def test_the_fastest_has_a_pilot_once_another_had_one():
    config = GateConfig(min_share_of_best=0.5)
    strategies = [
        piloted("pooled", 9.5, 8.0),
        piloted("sorted", 10.0, 8.1),
        candidate("packed", 11),
    ]
    assert judge(strategies, config).pilots == (2,)


def test_predictions_follow_the_pace_that_pilots_showed():
    config = GateConfig(min_ktok_s=12)
    strategies = [
        piloted("pooled", 12.2, 9.76),
        candidate("sorted", 14.6),
        candidate("random", 9.0),
    ]
    found = judge(strategies, config)
    assert found.pilots == (1,)
    assert found.verdicts[1].reason == (
        "sorted/diverse: 11.7 Ktok/s predicted at the pilots' pace (11.1..12.3), threshold 12: "
        "rejected; 53% of its slots are padding"
    )
    assert "7.20 Ktok/s predicted at the pilots' pace" in found.verdicts[2].reason


@pytest.mark.parametrize("share", [0.97, 1.0])
def test_the_fastest_has_no_pilot_against_itself(share):
    config = GateConfig(min_share_of_best=share)
    found = judge([candidate()], config)
    assert found.pilots == () and found.verdicts[0].passed
    assert judge([candidate(), candidate("sorted", 32)], config).pilots == ()


@pytest.mark.parametrize("pace", [0.7, 1.0, 1.3])
@pytest.mark.parametrize(
    "config", [GateConfig(min_share_of_best=0.95), GateConfig(min_ktok_s=10), GateConfig()]
)
def test_judging_again_after_each_pilot_ends(config, pace):
    strategies = [candidate(str(n), 9.0 + n / 4) for n in range(8)]
    had: list[int] = []
    while pilots := judge(strategies, config).pilots:
        assert not set(pilots) & set(had)
        had += pilots
        for n in pilots:
            actual = {"measured_ktok_s": strategies[n].prediction.ktok_s * pace * (1 + n % 3 / 20)}
            strategies[n] = strategies[n].model_copy(update=actual)
    final = judge(strategies, config)
    if config.min_share_of_best and had:
        fastest = max(strategies, key=lambda one: one.measured_ktok_s or one.ktok_s * pace)
        assert fastest.measured_ktok_s
    assert final.chosen is None or final.verdicts[final.chosen].passed


def test_a_near_miss_shows_the_decimals_that_tell_it_from_the_limit():
    near = only(GateConfig(min_ktok_s=19.98), ktok_s=19.97)
    assert "19.97 Ktok/s predicted (18.97..20.97), threshold 19.98: rejected" in near.reason
    far = only(GateConfig(min_ktok_s=12_345.6))
    assert "11.9 Ktok/s predicted (11.3..12.5), threshold 12,345.6: rejected" in far.reason
    padded = only(GateConfig(min_padding_efficiency=0.8), padding_efficiency=0.79996)
    assert "padding efficiency 0.79996 under 0.80000" in padded.reason


def test_a_pilot_too_short_to_warm_up_is_refused():
    with pytest.raises(ValueError, match=r"pilot_steps 2 is under 10, .*raise gate\.pilot_steps"):
        GateConfig(pilot_steps=2)
    assert GateConfig(pilot_steps=0).pilot_steps == 0


def test_no_pilot_is_run_for_what_fails_otherwise():
    assert not only(GateConfig(min_ktok_s=12, max_step_eta2=0.001)).straddles


def test_contradicting_thresholds_are_refused():
    with pytest.raises(ValueError, match=r"min_ktok_s 20 is absolute and min_share_of_best 0\.9"):
        GateConfig(min_ktok_s=20, min_share_of_best=0.9)
    with pytest.raises(ValueError, match="no effect on objective 'fastest'"):
        GateConfig(objective="fastest", diversity_weight=0.9)


def test_a_gate_without_candidates_is_an_error():
    with pytest.raises(ConfigError, match=r"no strategy; name some in compare\.strategies"):
        judge([], GateConfig())


def test_a_run_keeps_the_strategy_that_it_was_begun_with_as_long_as_that_passes():
    both = [candidate("sorted", 32), candidate("random", 31, step_length_eta2=0.001)]
    result = judge(both, GateConfig())
    assert result.chosen == 1
    kept = keep_begun(result, name="sorted", mixing="diverse")
    assert kept.chosen == 0 and kept.verdicts == result.verdicts
    assert "sorted/diverse is kept" in kept.reason
    assert keep_begun(result, name="random", mixing="diverse") == result
    assert keep_begun(result, name="sorted", mixing="contiguous") == result, "no candidate"
    strict = judge(both, GateConfig(min_ktok_s=31.5))
    assert keep_begun(strict, name="random", mixing="diverse") == strict, "it does not pass now"
