"""``dflash-flow plan --calibration`` from the outside."""

import json

import numpy as np
import polars as pl
import pytest
import torch

from dflash_core.calibration.program import hardware_of, versions_here
from flows.cli import main
from tests.dflash_core.throughput.machines import MARKS, machine

HERE = MARKS.model_copy(
    update={"hardware": hardware_of(torch.device("cpu")), "versions": versions_here()}
)
OLDER = HERE.model_copy(update={"versions": "torch 1.0"})


@pytest.fixture
def words(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return words_for(tmp_path, HERE)


def words_for(tmp_path, marks):
    lengths = np.random.default_rng(0).integers(10, 400, 300)
    data = tmp_path / "lengths.parquet"
    pl.DataFrame({"length": lengths, "supervised": lengths // 2}).write_parquet(data)
    cost = tmp_path / "cost.json"
    cost.write_text(machine(fingerprint=marks).model_dump_json())
    plan = ["plan", str(data), "--token-budget", "1000", "--strategies", "pooled"]
    return [*plan, "--gpus", "4", "--calibration", str(cost)]


def test_programs_read_ranked_options(words, capsys):
    assert main([*words, "--json"]) == 0
    advice = json.loads(capsys.readouterr().out)["advice"]
    options = advice["strategies"][0]["options"]
    speeds = [option["prediction"]["ktok_s"] for option in options]
    assert speeds == sorted(speeds, reverse=True)
    assert {option["split"]["num_target_ranks"] for option in options} == {0, 1, 2, 3}


def test_people_read_splits_and_reasons(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "4 colocated" in shown
    assert "of each rank's time" in shown
    assert f"calibrated on 2 ranks of {HERE.hardware}, predicted for 4 ranks" in shown


@pytest.mark.parametrize(
    ("marks", "more", "sentence"),
    [
        (MARKS, [], "was measured on 'two cores' and this machine is"),
        (OLDER, [], "was measured on 'torch 1.0' and this machine is 'torch "),
        (HERE, ["--epochs", "-3"], "--epochs is -3; give at least 1"),
        (HERE, ["--gpus", "0"], "there are 0 ranks to divide"),
        (HERE, ["--block-size", "16"], "was measured with a block size of 8, not 16"),
        (None, [], "does not say what it was measured on"),
    ],
)
def test_a_calibration_of_elsewhere_is_one_sentence(tmp_path, capsys, marks, more, sentence):
    assert main([*words_for(tmp_path, marks), *more]) == 2
    assert sentence in capsys.readouterr().err


def test_a_machine_elsewhere_can_be_planned_for(tmp_path, capsys):
    assert main([*words_for(tmp_path, MARKS), "--elsewhere"]) == 0
    assert "calibrated on 2 ranks of two cores" in " ".join(capsys.readouterr().out.split())


def test_a_calibration_of_the_processor_holds_where_there_is_a_gpu(words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    assert main(words) == 0


def test_one_rank_cannot_know_what_ranks_cost_each_other(tmp_path, capsys):
    alone = HERE.model_copy(update={"num_ranks": 1})
    assert main(words_for(tmp_path, alone)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "calibrated on one rank" in shown
    assert "4 ranks will be slower than this" in shown


@pytest.mark.parametrize(
    ("content", "sentence"), [(None, "cannot be read"), ("{}", "is no calibration")]
)
def test_a_missing_or_damaged_calibration_is_one_sentence(
    words, tmp_path, capsys, content, sentence
):
    file = tmp_path / "other.json"
    if content is not None:
        file.write_text(content)
    assert main([*words[:-1], str(file)]) == 2
    assert sentence in capsys.readouterr().err


def test_lengths_without_supervised_tokens_are_one_sentence(words, tmp_path, capsys):
    data = tmp_path / "bare.npy"
    np.save(data, np.full(50, 100))
    assert main(["plan", str(data), *words[2:]]) == 2
    assert "without supervised tokens" in capsys.readouterr().err
