"""Who serves from now on: by what the settings name, and never under the least speed-up."""

from pathlib import Path

import numpy as np
import pytest

from configs.settings import RetrainConfig, Settings
from dflash_core.corpus.store import Sample, write_store
from dflash_core.errors import ConfigError
from tasks.promote import check_judgeable, is_better
from tests.dflash_core.decoding.test_comparison import report

OLD = report([(30, 10)] * 8, [(2.0, 4.0), (2.2, 4.5)] * 4)
ACCEPTS_MORE = report([(40, 10)] * 8, [(4.0, 3.9), (4.1, 4.0)] * 4)


def test_the_measure_that_is_named_decides() -> None:
    assert is_better(RetrainConfig(), ACCEPTS_MORE, OLD)[0]
    better, words = is_better(RetrainConfig(promote_by="speedup"), ACCEPTS_MORE, OLD)
    assert not better
    assert words.startswith("speedup 0.975 against 2.024, gain -1.049 (-1.0")
    assert "slower than plain decoding" in words
    assert is_better(RetrainConfig(promote_by="speedup"), OLD, ACCEPTS_MORE)[0]


@pytest.mark.parametrize("champion", [None, OLD])
def test_a_drafter_under_the_least_speed_up_is_not_promoted(champion) -> None:
    better, words = is_better(RetrainConfig(min_speedup=1), ACCEPTS_MORE, champion)
    assert not better and words.endswith("under retrain.min_speedup 1")


@pytest.mark.parametrize("retrain", [{"promote_by": "speedup"}, {"min_speedup": 1.1}])
def test_a_speed_that_counts_must_be_measured(retrain) -> None:
    with pytest.raises(ValueError, match=r"evaluation\.compare_plain false leaves unmeasured"):
        Settings.model_validate(
            {"target": {"path": "x"}, "evaluation": {"compare_plain": False}, "retrain": retrain}
        )


def test_prompts_too_few_to_judge_by_speed_are_said_before_the_training(tmp_path: Path) -> None:
    ids, mask = np.arange(4, dtype=np.int32), np.arange(4) > 1
    write_store(tmp_path / "held_out", [Sample(ids, mask, "d", f"s{n}") for n in range(7)])

    def settings(size: int) -> Settings:
        evaluation = {"batch_sizes": [size]}
        retrain = {"promote_by": "speedup"}
        given = {"target": {"path": "x"}, "evaluation": evaluation, "retrain": retrain}
        return Settings.model_validate(given)

    check_judgeable(settings(3), tmp_path / "held_out")
    with pytest.raises(ConfigError, match=r"batch_sizes\[0\] 4, but 7 prompts are held out"):
        check_judgeable(settings(4), tmp_path / "held_out")
