"""The whole chain on a tiny corpus: real Prefect, real torchrun, real MLflow, queried back."""

import json
from pathlib import Path
from statistics import median

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from configs.settings import Settings
from dflash_core.artifacts import read_manifest
from dflash_core.errors import ConfigError
from dflash_core.export.write import DRAFTER_KIND, DRAFTER_VERSION
from dflash_core.export.zlab import load_drafter
from flows.train_drafter import train_drafter
from tasks.places.run_folder import open_run_folder
from tests.flows.conftest import MakeSettings

pytestmark = pytest.mark.usefixtures("prefect_server")


def tracked(settings: Settings, name: str) -> tuple[MlflowClient, Run, list[Run]]:
    """Return a client, the flow's parent run and its nested runs."""
    client = MlflowClient(f"sqlite:///{settings.run.root / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("target")
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [run for run in runs if run.info.run_name == name]
    nested = [r for r in runs if r.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    return client, parent, nested


def relative(shares: dict[str, float]) -> dict[str, float]:
    return {stage: share / sum(shares.values()) for stage, share in shares.items()}


def test_accepted_run_trains_measures_registers_and_reports(tiny_settings: MakeSettings) -> None:
    often = {"epochs": 1, "topology": {"num_ranks": 2}, "validation": {"every_steps": 2}}
    settings = tiny_settings(run={"name": "accepted"}, training=often)
    state = train_drafter(settings, return_state=True)
    assert state.is_completed(), state.message
    summary = state.result()

    assert summary.training.num_steps > 0
    (epoch,) = summary.training.accuracy.epochs
    predicted = relative(epoch.predicted_busy)
    lines = (settings.run.root / "accepted" / "training" / "metrics.jsonl").read_text().splitlines()
    steps = [relative(json.loads(line)["busy_shares"]) for line in lines]
    # The median: all steps take half a second together, and a machine may stop for longer in one.
    usual = {stage: median(step[stage] for step in steps) for stage in predicted}
    assert predicted == pytest.approx(usual, abs=0.25)  # stages are defined alike
    assert epoch.measured_busy.keys() == predicted.keys()
    assert 0 < predicted["prefetch"] < 0.2
    assert summary.acceptance.tau >= 1
    assert summary.acceptance.exactness.num_faults == 0
    assert summary.corpus.num_regenerated > 0 and summary.corpus.num_kept > 0

    folder = settings.run.root / "accepted"
    assert load_drafter(folder / "drafter").spec.block_size == 4
    manifest = read_manifest(folder / "drafter", kind=DRAFTER_KIND, format_version=DRAFTER_VERSION)
    assert manifest.metadata["settings"]["draft"]["block_size"] == 4
    page = (folder / "report.html").read_text()
    assert summary.gate.reason in page
    assert "<script" not in page and 'src="' not in page

    client, parent, nested = tracked(settings, "accepted")
    assert parent.data.params["batching.token_budget"] == "512"
    assert {run.info.run_name for run in nested} == {
        "strategy-sorted-diverse",
        "strategy-random-diverse",
        "strategy-bucketed-diverse",
        "training",
    }
    (training,) = [run for run in nested if run.info.run_name == "training"]
    history = client.get_metric_history(training.info.run_id, "loss")
    assert [point.step for point in history] == list(range(1, summary.training.num_steps + 1))
    assert client.get_metric_history(training.info.run_id, "held_out_loss")
    version = client.get_model_version_by_alias("dflash-drafter", "challenger")
    assert version.run_id == training.info.run_id
    assert float(version.tags["tau"]) == pytest.approx(summary.acceptance.tau, abs=1e-4)

    encoder = {"digest": summary.corpus.encoder, "thinking": "prompts hold no thought"}
    assert manifest.metadata["encoder"] == encoder
    assert f"{encoder['thinking']} ({encoder['digest'][:8]})" in page
    assert training.data.params["encoder.thinking"] == version.tags["encoder_thinking"]
    assert version.tags["encoder_digest"] == encoder["digest"]


def test_rejected_run_is_a_normal_outcome_that_reuses_and_says_why(
    tiny_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny_settings(run={"name": "rejected"}, gate={"min_ktok_s": 1e6})
    cache = settings.run.root / "cache"
    before = {path: path.stat().st_mtime_ns for path in cache.glob("*")}
    monkeypatch.chdir(tmp_path)
    state = train_drafter(settings, return_state=True)
    assert (state.type.value, state.name) == ("FAILED", "Rejected"), state.message
    assert "none of sorted/diverse, random/diverse, bucketed/diverse passes" in state.message

    folder = settings.run.root / "rejected"
    assert not (folder / "training").exists()
    assert "rejected" in (folder / "report.html").read_text()
    _, parent, nested = tracked(settings, "rejected")
    assert parent.data.tags["gate"] == "rejected"
    assert len(nested) == 3
    for run in nested:
        assert run.data.tags["gate"] == "rejected"
        assert "threshold 1,000,000: rejected" in run.data.tags["gate.reason"]

    after = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    kinds = {path.name.split("-")[0] for path in after}
    # Whether "registered" is there depends on an accepted run before this one.
    assert kinds - {"registered"} == {"corpus", "answers", "profile", "calibration"}
    assert not before or after == before
    assert list(tmp_path.iterdir()) == [], "the working folder must stay clean"


@pytest.mark.integration
def test_a_run_goes_on_with_the_strategy_that_it_was_begun_with(
    tiny_settings: MakeSettings,
) -> None:
    """What the gate prefers is measured anew each time; a checkpoint has one plan."""
    one = tiny_settings(run={"name": "begun"}, compare={"strategies": ["random"]})
    begun = train_drafter(one)
    more = tiny_settings(
        run={"name": "begun"},
        compare={"strategies": ["sorted", "random"]},
        gate={"objective": "fastest"},
    )
    state = train_drafter(more, return_state=True)
    assert state.is_completed(), state.message
    gate = state.result().gate
    assert gate.chosen == 1
    assert gate.reason == "random/diverse is kept, which passes and this run was begun with"
    assert state.result().training.num_steps == begun.training.num_steps


def test_a_run_folder_is_held_by_one_process(tiny_settings: MakeSettings) -> None:
    settings = tiny_settings(run={"name": "held"})
    with open_run_folder(settings.run, default_name="x") as folder:
        assert folder.path.is_dir()
        state = train_drafter(settings, return_state=True)
    with pytest.raises(ConfigError, match="another process is working in"):
        state.result()
