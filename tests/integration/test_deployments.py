"""Deployments from the shell, on a real server with a real worker: to every kind of end."""

import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient

from configs.settings import RunConfig, Settings, load_settings
from dflash_core.training.telemetry.status import read_status
from tests.flows.conftest import MakeSettings
from tests.integration.places import (
    ROOT,
    Place,
    end,
    listening_on,
    paused,
    processes_with,
    steps_done,
    wait_for,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

LONG: dict[str, Any] = {"epochs": 40, "checkpoint_every_steps": 5}


@pytest.fixture(scope="module")
def automation(place: Place) -> None:
    """The one that docs/deploy.md recommends."""
    place.shell("automation", "create", "--from-file", "configs/automations/lost-runs.yaml")


def named(
    tiny_settings: MakeSettings, name: str, *, limit: str | None = "gpu-pool", **training: object
) -> Settings:
    sections = {"training": training} if training else {}
    return tiny_settings(
        run={"name": name, "concurrency_limit": limit},
        compare={"strategies": ["bucketed"]},
        **sections,
    )


def steps_in_mlflow(settings: Settings) -> list[list[int]]:
    """Return the steps of each training of a run's folder as MLflow has them, newest first."""
    client = MlflowClient(f"sqlite:///{settings.run.root / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name(settings.target.path.name)
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    parents = [run.info.run_id for run in runs if run.info.run_name == settings.run.name]
    return [
        sorted(point.step for point in client.get_metric_history(run.info.run_id, "loss"))
        for run in runs
        if run.data.tags.get("mlflow.parentRunId") in parents and run.info.run_name == "training"
    ]


def all_steps(settings: Settings) -> list[int]:
    return list(range(1, steps_done(folder(settings)) + 1))


def test_from_the_shell_to_completed(place: Place, runs: Path) -> None:
    """The deployment as it is, but for the place of its results."""
    tiny = load_settings(ROOT / "configs" / "tiny.toml")
    run = {"root": runs, "name": "whole", "concurrency_limit": "gpu-pool"}
    settings = tiny.model_copy(update={"run": RunConfig.model_validate(run)})
    place.run("train-drafter/tiny", settings, "first", "--watch")
    run = place.flow_run("first")
    assert run["state"]["type"] == "COMPLETED"
    assert {"dflash", "training"} <= set(run["tags"])
    found = place.ask("/artifacts/filter", flow_runs={"id": {"any_": [run["id"]]}})
    kinds = {artifact["key"]: artifact["type"] for artifact in found}
    assert kinds == {
        "lengths": "markdown",
        "report": "markdown",
        "run-summary": "markdown",
        "strategies": "table",
        "training-progress": "progress",
    }
    assert next(a["data"] for a in found if a["type"] == "progress") == 100
    logs = place.logs("first")
    assert "waiting for a slot of gpu-pool" in logs and "gate: " in logs
    assert steps_in_mlflow(settings) == [all_steps(settings)]
    assert place.server is not None
    assert listening_on(place.server) == {"127.0.0.1"}


def test_rejection_is_an_end_of_its_own(place: Place, tiny_settings: MakeSettings) -> None:
    settings = named(tiny_settings, "rejected").model_copy(
        update={"gate": tiny_settings(gate={"min_ktok_s": 1e6}).gate}
    )
    place.run("train-drafter/tiny", settings, "rejected", "--watch", code=1)
    run = place.flow_run("rejected")
    assert (run["state"]["type"], run["state"]["name"]) == ("FAILED", "Rejected")
    assert "none of bucketed/diverse passes the gate" in run["state"]["message"]
    assert run["run_count"] == 1


def test_parameters_are_checked_before_anything_runs(place: Place) -> None:
    said = place.shell(
        *("deployment", "run", "train-drafter/tiny"),
        *("--param", 'settings={"target": {"path": "x"}, "trainng": {}}'),
        code=1,
    )
    assert "trainng" in said


def test_cancelling_saves_and_leaves_no_process(place: Place, tiny_settings: MakeSettings) -> None:
    # So many epochs that the request comes before their end.
    settings = named(tiny_settings, "cancelled", **{**LONG, "epochs": 600})
    place.run("train-drafter/tiny", settings, "cancelled")
    wait_for(lambda: steps_done(folder(settings)) >= 6, what="six steps")
    run = place.flow_run("cancelled")
    assert processes_with(run["id"]) and processes_with(str(folder(settings)))
    place.shell("flow-run", "cancel", run["id"])
    wait_for(lambda: place.state("cancelled") == "Cancelled", what="the cancellation")
    words = (run["id"], str(folder(settings)))
    wait_for(lambda: not processes_with(*words), timeout_s=60, what="the end of every process")
    status = read_status(folder(settings))
    assert status is not None and status.state == "interrupted" and status.step >= 6


@pytest.mark.usefixtures("automation")
def test_a_run_resumes_after_its_worker_was_killed(
    place: Place, tiny_settings: MakeSettings
) -> None:
    """The machine goes: worker and flow are killed together, and another worker takes over."""
    # Without a limit: Prefect gives the slot of a dead run back after five minutes only.
    settings = named(tiny_settings, "killed", limit=None, **LONG)
    place.run("train-drafter/tiny", settings, "killed")
    run = place.flow_run("killed")
    wait_for(lambda: steps_done(folder(settings)) >= 11, what="eleven steps")
    assert place.worker is not None
    end(place.worker, signal.SIGKILL)
    for process in processes_with(run["id"]):
        with suppress(psutil.NoSuchProcess):  # the death of one ends others
            if "prefect" in " ".join(process.cmdline()):
                process.kill()
    wait_for(lambda: not processes_with(str(folder(settings))), what="the end of every rank")
    before = (folder(settings) / "metrics.jsonl").read_bytes()

    place.start_worker()
    place.run("train-drafter/tiny", settings, "resumed", "--watch")
    after = (folder(settings) / "metrics.jsonl").read_bytes()
    assert len(after) > len(before) and after.startswith(before), "nothing was trained twice"
    resumed, killed = steps_in_mlflow(settings)
    assert resumed == all_steps(settings), "the whole history, every step once"
    assert killed == resumed[: len(killed)], "what MLflow had been told, every step once"
    wait_for(lambda: place.state("killed") == "Crashed", what="the automation")


def test_training_goes_on_without_the_prefect_server(
    place: Place, tiny_settings: MakeSettings
) -> None:
    settings = named(tiny_settings, "alone", epochs=60, checkpoint_every_steps=100)
    place.run("train-drafter/tiny", settings, "alone")
    wait_for(lambda: steps_done(folder(settings)) >= 6, what="six steps")
    assert place.server is not None
    with paused(folder(settings)):
        end(place.server)
    alone_since = steps_done(folder(settings))
    wait_for(lambda: steps_done(folder(settings)) > alone_since + 20, what="twenty steps")
    with paused(folder(settings)):
        place.start_server()
        assert place.state("alone") == "Running"
    wait_for(lambda: place.state("alone") == "Completed", what="the end of the run")
    assert steps_in_mlflow(settings) == [all_steps(settings)]
    limit = place.ask("/v2/concurrency_limits/gpu-pool")
    assert limit["active_slots"] == 0, "a slot taken before the restart was given back after it"


def folder(settings: Settings) -> Path:
    assert settings.run.name is not None
    return settings.run.root / settings.run.name / "training"


def test_the_repository_stays_as_it_was() -> None:
    assert not (ROOT / "mlruns").exists() and not (ROOT / "mlflow.db").exists()
