"""``dflash-flow plan`` from the outside."""

import json

import numpy as np
import polars as pl
import pytest

from dflash_core.planning import StrategyReport
from flows.cli import main


@pytest.fixture
def lengths(tmp_path):
    path = tmp_path / "lengths.npy"
    np.save(path, np.random.default_rng(0).integers(10, 400, 300))
    return str(path)


def test_programs_read_one_object_with_all_of_the_report(lengths, capsys):
    words = ["plan", lengths, "--token-budget", "1000", "--world-size", "2", "--json"]
    assert main([*words, "--strategies", "sorted,pooled", "--mixing", "all"]) == 0
    comparison = json.loads(capsys.readouterr().out)
    assert (comparison["num_samples"], comparison["token_budget"]) == (300, 1000)
    assert len(comparison["strategies"]) == 6
    assert all(
        set(row) == set(StrategyReport.model_fields) - {"plan"} for row in comparison["strategies"]
    )


def test_people_read_a_table_of_every_strategy(lengths, capsys):
    assert main(["plan", lengths, "--token-budget", "1000"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("sorted", "random", "bucketed", "pooled", "packed"))
    assert "try a lower --pool-size" in " ".join(shown.split())


def test_save_writes_plans_and_picture(lengths, tmp_path, capsys):
    out = tmp_path / "saved"
    words = [
        "plan",
        lengths,
        "--token-budget",
        "1000",
        "--strategies",
        "packed",
        "--save",
        str(out),
    ]
    assert main(words) == 0
    assert capsys.readouterr().out
    assert (out / "trade.png").read_bytes().startswith(b"\x89PNG")
    with np.load(out / "packed-diverse.npz") as arrays:
        assert sorted(arrays["order"].tolist()) == list(range(300))


def test_lengths_and_supervised_tokens_come_from_token_data(tmp_path, capsys):
    path = tmp_path / "data.parquet"
    rows = [[1] * n for n in (5, 9, 3, 7)]
    mask = [[True] * n for n in (5, 9, 3, 7)]
    pl.DataFrame({"input_ids": rows, "loss_mask": mask}).write_parquet(path)
    words = ["plan", str(path), "--token-budget", "20", "--anchor-budget", "8", "--json"]
    assert main(words) == 0
    rows = json.loads(capsys.readouterr().out)["strategies"]
    assert all(row["diversity"]["supervised_per_step"]["mean"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--strategies", "best"], "best"),
        (["--strategies", ","], "names none"),
        (["--token-budget", "100"], "batching.token_budget"),
        (["--token-budget", "0"], "token_budget"),
        (["--seed", "-1"], "seed is -1"),
        (["--edges", "9,5", "--strategies", "bucketed"], "edges"),
    ],
)
def test_bad_input_exits_with_2_and_one_sentence(lengths, capsys, words, sentence):
    assert main(["plan", lengths, *words]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
