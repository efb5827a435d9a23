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


KEYS = [
    *("name", "mixing", "padding_efficiency", "budget_fill", "num_micro_batches", "num_steps"),
    *("length_eta2", "step_length_eta2", "pair_recurrence", "straggler_factor"),
    *("distinct_shapes", "max_slots", "num_dropped", "plan_s"),
]


def test_programs_read_one_object_of_known_keys_and_on_request_every_measure(lengths, capsys):
    words = ["plan", lengths, "--token-budget", "1000", "--world-size", "2", "--json"]
    assert main([*words, "--strategies", "sorted,pooled,sorted", "--mixing", "all"]) == 0
    comparison = json.loads(capsys.readouterr().out)
    assert list(comparison) == ["num_samples", "total_tokens", "token_budget", "strategies"]
    assert (comparison["num_samples"], comparison["token_budget"]) == (300, 1000)
    assert [list(row) for row in comparison["strategies"]] == [KEYS] * 6
    assert main([*words, "--strategies", "sorted", "--details"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["strategies"]
    assert set(row) >= set(StrategyReport.model_fields) - {"plan"}
    assert len(row["content_hash"]) == len(row["layout_hash"]) == 64


def test_people_read_a_table_of_every_strategy(lengths, capsys):
    assert main(["plan", lengths, "--token-budget", "1000", "--mixing", "all"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("sorted", "random", "bucketed", "pooled", "packed"))
    assert shown.count("mixing ") == shown.count("ciency  batches") == 3
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
    (row,) = json.loads((out / "comparison.json").read_text())["strategies"]
    assert row["content_hash"] and row["diversity"]
    with np.load(out / "packed-diverse.npz") as arrays:
        assert sorted(arrays["order"].tolist()) == list(range(300))


def test_lengths_and_supervised_tokens_come_from_token_data(tmp_path, capsys):
    path = tmp_path / "data.parquet"
    rows = [[1] * n for n in (5, 9, 3, 7)]
    mask = [[True] * n for n in (5, 9, 3, 7)]
    pl.DataFrame({"input_ids": rows, "loss_mask": mask}).write_parquet(path)
    words = ["plan", str(path), "--token-budget", "20", "--anchor-budget", "8", "--json"]
    assert main([*words, "--details"]) == 0
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
        (["--world-size", "99999999999"], "places; lower the number of ranks"),
        (["--micro-batches-per-step", "9999999"], "micro_batches_per_step"),
        (["--edges", "9,5", "--strategies", "bucketed"], "edges"),
        (["--save", __file__, "--strategies", "sorted"], "is there and is no plan-comparison"),
    ],
)
def test_bad_input_exits_with_2_and_one_sentence(lengths, capsys, words, sentence):
    assert main(["plan", lengths, *words]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_a_folder_with_other_things_is_not_replaced(lengths, tmp_path, capsys):
    words = ["plan", lengths, "--token-budget", "1000", "--strategies", "sorted", "--save"]
    assert main([*words, str(tmp_path)]) == 2
    assert "is there and is no plan-comparison, so it is not replaced" in capsys.readouterr().err
    assert np.load(lengths).size == 300
    (store := tmp_path / "store").mkdir()
    files = {"kind": "token-store", "format_version": 1, "content_hash": "", "files": {}}
    (store / "manifest.json").write_text(json.dumps(files))
    assert main([*words, str(store)]) == 2
    assert "is there and is no plan-comparison, so it is not replaced" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--edges", "--edge-cost"])
def test_lists_that_are_no_numbers_are_named(lengths, capsys, option):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", lengths, option, "100,a"])
    assert "'100,a' is no list of " in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--edge-objective", "cost", "--edge-cost", "0.01,2e-5,7e-9"],
        ["--edge-objective", "batch_maximum"],
        ["--edge-grid", "harmonic", "--pad-to", "edge"],
        ["--multiple-of", "64", "--pad-to", "edge"],
        ["--edges", "100,200,400"],
    ],
)
def test_every_manner_of_edges_can_be_asked_for(lengths, capsys, options):
    words = ["plan", lengths, "--token-budget", "1000", "--strategies", "bucketed", "--json"]
    assert main([*words, *options]) == 0
    (row,) = json.loads(capsys.readouterr().out)["strategies"]
    assert row["num_dropped"] == 0
    assert row["max_slots"] <= 1000


def test_a_file_of_nothing_but_lengths_needs_no_column_name(tmp_path, capsys):
    path = tmp_path / "lengths.parquet"
    pl.DataFrame({"n": [5, 9, 3]}).write_parquet(path)
    assert main(["plan", str(path), "--token-budget", "20", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total_tokens"] == 17
    pl.DataFrame({"n": [5, 9, 3], "other": [1, 1, 1]}).write_parquet(path)
    words = ["plan", str(path), "--token-budget", "20", "--json"]
    assert main(words) == 2
    assert "name its columns with --length-column" in capsys.readouterr().err
    assert main([*words, "--length-column", "n"]) == 0
    pl.DataFrame({"n": [5, 9, 3]}).write_parquet(path)
    assert main([*words, "--length-column", "other"]) == 2


SURVIVAL = {
    "all equal": [25] * 40,
    "95 % at the cap": [1000] * 95 + [20] * 5,
    "two lengths": [10] * 20 + [50] * 20,
    "exactly at the budget": [1000, 10, 20],
    "one over": [1001, 10],
    "one sample": [7],
    "one giant": [1000] + [10] * 300,
    "zero, negative, sentinel": [0, -5, 2**63 - 1, 5, 6],
    "missing": [None, float("nan"), 5.0],
}


@pytest.mark.parametrize("name", SURVIVAL)
def test_inputs_on_which_others_break(tmp_path, capsys, name):
    path = tmp_path / "lengths.parquet"
    lengths = SURVIVAL[name]
    pl.DataFrame({"length": lengths}, strict=False).write_parquet(path)
    usable = [n for n in lengths if n is not None and 1 <= n <= 1000]
    words = ["plan", str(path), "--token-budget", "1000", "--world-size", "3", "--json"]
    assert main(words) == (0 if len(usable) == len(lengths) else 2)
    assert capsys.readouterr().err.count("\n") == (0 if len(usable) == len(lengths) else 1)
    assert main([*words, "--oversize", "drop", "--mixing", "all"]) == 0
    comparison = json.loads(capsys.readouterr().out)
    assert comparison["num_samples"] == len(usable)
    assert len(comparison["strategies"]) == 15
    for row in comparison["strategies"]:
        assert row["num_dropped"] == len(lengths) - len(usable)
        assert row["max_slots"] <= 1000


def test_an_output_that_cannot_be_written_is_named(lengths, capsys):
    words = ["plan", lengths, "--token-budget", "1000", "--strategies", "sorted", "--save"]
    assert main([*words, "/dev/null/saved"]) == 2
    assert "/dev/null cannot be used" in capsys.readouterr().err
