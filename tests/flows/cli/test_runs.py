"""Runs in the terminal: listed, compared, and delivered late."""

import json
import math
from pathlib import Path

import pytest

from configs.settings import RunConfig, Settings
from dflash_core.target.config import TargetConfig
from flows.cli import EXIT_INPUT, main
from tasks.places.run_folder import open_run_folder
from tasks.tracking.run import open_tracking


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two recorded runs, made without training anything."""
    root = tmp_path_factory.mktemp("runs")
    record(root, "first", seed=0, tau=1.5)
    record(root, "second", seed=1, tau=2.5)
    return root


def record(root: Path, name: str, *, seed: int, tau: float) -> None:
    config = RunConfig(root=root, name=name)
    settings = Settings(target=TargetConfig(path=Path("toy")), run=config)
    with (
        open_run_folder(config, default_name="") as folder,
        open_tracking(settings, folder) as run,
    ):
        run.log_params({"training": {"seed": seed, "epochs": 2}})
        with run.child("strategy-sorted-diverse", {"gate": "rejected"}):
            pass
        with run.child("training", {"strategy": "bucketed", "mixing": "diverse"}) as training:
            training.log_metrics({"tau": tau, "ktok_s_measured": 3.25, "loss": 4.0})
            # MLflow keeps what anybody logs; one run's must not hide the others.
            training.log_metrics({"somebody.elses": math.nan})


def test_runs_are_listed_newest_first(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--root", str(root), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in found["runs"]] == ["second", "first"]
    newest = found["runs"][0]
    assert newest["strategy"] == "bucketed/diverse"
    assert newest["rejected"] == ["strategy-sorted-diverse"]
    assert newest["metrics"]["tau"] == 2.5
    assert "somebody.elses" not in newest["metrics"]


def test_comparison_shows_only_what_differs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "first", "second", "--root", str(root)]) == 0
    shown = capsys.readouterr().out
    assert "training.seed" in shown and "training.epochs" not in shown
    assert "1.500" in shown and "2.500" in shown


def test_unknown_run_is_one_sentence(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "third", "--root", str(root)]) == EXIT_INPUT
    error = capsys.readouterr().err
    assert error == "dflash-flow: MLflow knows no run 'third'; the newest are first, second\n"


def test_an_mlflow_that_is_away_is_one_sentence(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["runs", "--root", str(root), "--uri", "http://127.0.0.1:9"]
    assert main(arguments) == 1
    assert "MLflow at http://127.0.0.1:9 does not answer" in capsys.readouterr().err
