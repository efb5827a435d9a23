"""Tracking against a real MLflow database: nothing is lost, nothing comes twice."""

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from prefect.exceptions import TerminationSignal
from pydantic import ValidationError

from configs.addresses import without_secrets
from configs.settings import RunConfig, Settings, TrackingConfig
from dflash_core.errors import ConfigError, Interrupted, TrackingError
from dflash_core.target.config import TargetConfig
from flows.cli import first_problem
from tasks.places.run_folder import RunFolder, held_folder, open_run_folder
from tasks.tracking.run import StepMetrics, deliver_pending, open_tracking, tracking_client
from tasks.tracking.spool import Spool, now_ms


class Line:
    """A client behind a line that can be cut."""

    def __init__(self, client: MlflowClient) -> None:
        self._client = client
        self.cut = False

    def __getattr__(self, name: str) -> Any:
        if self.cut and name != "tracking_uri":
            raise ConnectionError("the line is cut")
        return getattr(self._client, name)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def client(root: Path) -> MlflowClient:
    return tracking_client(TrackingConfig(), root)


@pytest.fixture
def folder(root: Path, request: pytest.FixtureRequest) -> Iterator[RunFolder]:
    config = RunConfig(root=root, name=request.node.name[:60])
    with open_run_folder(config, default_name="") as opened:
        yield opened


def settings_for(folder: RunFolder) -> Settings:
    tracking = TrackingConfig(experiment=folder.name)
    return Settings(target=TargetConfig(path=Path("some-target")), tracking=tracking)


def runs_of(client: MlflowClient, experiment: str) -> dict[str, Run]:
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    return {run.info.run_name: run for run in client.search_runs([found.experiment_id])}


def steps(first: int, last: int) -> list[dict[str, Any]]:
    return [
        {"step": step, "loss": 1 / step, "loss_by_position": [step, None], "bottleneck": "draft"}
        for step in range(first, last + 1)
    ]


def test_parent_children_and_everything_they_keep(client: MlflowClient, folder: RunFolder) -> None:
    with open_tracking(settings_for(folder), folder) as run:
        run.log_params({"batching": {"token_budget": 512}})
        run.log_dataset("chats", digest="d" * 64, source="/data/x", profile={"num_samples": 3})
        run.log_table("strategies.json", {"name": ["sorted", "random"], "eta2": [0.9, 0.1]})
        with run.child("training", {"strategy": "random"}) as training:
            StepMetrics(training).deliver(steps(1, 3))
            training.log_json("facts/acceptance.json", {"tau": 2.0})
    runs = runs_of(client, folder.name)
    parent, nested = runs[folder.name], runs["training"]
    assert parent.info.status == nested.info.status == "FINISHED"
    assert nested.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert nested.data.tags["strategy"] == "random"
    assert parent.data.params == {"batching.token_budget": "512"}
    assert json.loads(parent.inputs.dataset_inputs[0].dataset.profile) == {"num_samples": 3}
    assert json.loads(parent.data.tags["mlflow.loggedArtifacts"])[0]["type"] == "table"
    (table,) = client.list_artifacts(parent.info.run_id)
    assert table.path == "strategies.json"
    history = client.get_metric_history(nested.info.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert "loss_by_position/1" in nested.data.metrics
    assert "loss_by_position/2" not in nested.data.metrics
    assert [f.path for f in client.list_artifacts(nested.info.run_id, "facts")] == [
        "facts/acceptance.json"
    ]


def test_lines_read_again_are_not_sent_again(client: MlflowClient, folder: RunFolder) -> None:
    with open_tracking(settings_for(folder), folder) as run:
        metrics = StepMetrics(run)
        metrics.deliver(steps(1, 3))
        metrics.deliver(steps(1, 5))
        history = client.get_metric_history(run.run_id, "loss")
    assert [point.step for point in history] == [1, 2, 3, 4, 5]


def test_an_outage_delays_and_loses_nothing(client: MlflowClient, tmp_path: Path) -> None:
    line = Line(client)
    spool = Spool(tmp_path, line)  # type: ignore[arg-type]
    put_run(spool, "outage")
    put_step(spool, 1)
    line.cut = True
    for step in range(2, 6):
        put_step(spool, step)
    assert spool.num_waiting == 4
    line.cut = False
    assert spool.send(now=True)
    assert steps_of(client, spool) == [1, 2, 3, 4, 5]


def test_a_crash_before_the_cursor_moves_repeats_nothing(
    client: MlflowClient, tmp_path: Path
) -> None:
    """All was sent, and the process died before it could write down that it was."""
    spool = Spool(tmp_path, client)
    put_run(spool, "crash")
    first = spool.run_id("k", patience_s=0)
    put_step(spool, 1)
    put_step(spool, 2)
    (tmp_path / "cursor.json").unlink()
    with (tmp_path / "journal.jsonl").open("a") as journal:
        journal.write('{"kind": "metrics", "run": "k", "ro')  # cut short
    again = Spool(tmp_path, client)
    assert again.num_waiting == 3
    assert again.run_id("k", patience_s=0) == first
    assert steps_of(client, again) == [1, 2]


def test_a_later_run_delivers_and_ends_what_a_killed_one_left(
    client: MlflowClient, root: Path, folder: RunFolder
) -> None:
    """Whatever its folder is called: flow runs have had all kinds of names."""
    line = Line(client)
    spool = Spool(root / "killed (again)" / "tracking", line)  # type: ignore[arg-type]
    put_run(spool, "killed")
    line.cut = True
    put_step(spool, 1)
    with held_folder(root / "killed (again)", place="run.root", name="run.name"):
        assert deliver_pending(root, client) == {}, "somebody still works there"
    with open_tracking(settings_for(folder), folder):
        pass
    run = runs_of(client, "killed")["killed"]
    assert run.info.status == "KILLED"
    assert run.data.metrics == {"loss": 1.0}
    assert Spool.unfinished(root, client) == []


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError(), "FAILED"),
        (KeyboardInterrupt(), "KILLED"),
        (Interrupted("saved"), "KILLED"),
        (TerminationSignal(signal.SIGTERM), "KILLED"),
    ],
)
def test_whoever_stops_a_run_it_ends_as_killed(
    root: Path, client: MlflowClient, error: BaseException, status: str
) -> None:
    config = RunConfig(root=root, name=type(error).__name__)
    with (
        pytest.raises(type(error)),
        open_run_folder(config, default_name="") as folder,
        open_tracking(settings_for(folder), folder),
    ):
        raise error
    (run,) = runs_of(client, config.name or "").values()
    assert run.info.status == status


def test_what_needs_an_answer_says_how_long_it_waited(tmp_path: Path) -> None:
    nobody = tracking_client(TrackingConfig(uri="http://127.0.0.1:9"), tmp_path)
    spool = Spool(tmp_path, nobody)
    put_run(spool, "nobody")
    with pytest.raises(TrackingError, match=r"127\.0\.0\.1:9 has not answered for 0 s"):
        spool.run_id("k", patience_s=0)


def test_another_mlflow_does_not_take_over_unsent_messages(
    client: MlflowClient, tmp_path: Path
) -> None:
    nobody = tracking_client(TrackingConfig(uri="http://127.0.0.1:9"), tmp_path)
    put_run(Spool(tmp_path, nobody), "nobody")
    with pytest.raises(ConfigError, match="holds 1 messages for MLflow at http") as refused:
        Spool(tmp_path, client)
    words = f"runs --deliver --root {tmp_path.parent.parent} --uri http://127.0.0.1:9'"
    assert words in str(refused.value)


def test_a_crash_while_another_mlflow_takes_over_loses_nothing(
    client: MlflowClient, tmp_path: Path
) -> None:
    """The journal was gone already, and the cursor still counted its lines."""
    cursor = {"uri": "http://127.0.0.1:9", "sent": 5, "ids": {}}
    (tmp_path / "cursor.json").write_text(json.dumps(cursor))
    assert Spool(tmp_path, client).num_waiting == 0
    assert json.loads((tmp_path / "cursor.json").read_text())["sent"] == 0


def test_a_line_cut_short_by_a_full_disk_leaves_the_journal_whole(tmp_path: Path) -> None:
    """A file-size limit stands in for the full disk: both write a part and then fail."""
    nobody = tracking_client(TrackingConfig(uri="http://127.0.0.1:9"), tmp_path)
    spool = Spool(tmp_path, nobody)
    put_run(spool, "full")
    before = (tmp_path / "journal.jsonl").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            put_step(spool, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "journal.jsonl").read_bytes() == before
    spool.put("end", "k", {"status": "FAILED", "at_ms": 0})
    assert Spool(tmp_path, nobody).num_waiting == 2


@pytest.mark.parametrize("damaged", ["journal.jsonl", "cursor.json"])
def test_a_damaged_run_does_not_stop_the_others(
    client: MlflowClient, tmp_path: Path, damaged: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        line = Line(client)
        spool = Spool(tmp_path / name / "tracking", line)  # type: ignore[arg-type]
        line.cut = True
        put_run(spool, f"{damaged}-{name}", key=f"{damaged}-{name}")
    (tmp_path / "a" / "tracking" / damaged).write_text('{"kind": "params"{"kind": "end"}\n')
    assert deliver_pending(tmp_path, client) == {"b": 0}
    assert "a is left out" in caplog.text and f"{damaged} is damaged" in caplog.text


def test_a_message_that_mlflow_refuses_does_not_stop_the_rest(
    client: MlflowClient, tmp_path: Path
) -> None:
    spool = Spool(tmp_path, client)
    put_run(spool, "refused")
    spool.put("params", "k", {"values": {"a": "1"}})
    spool.put("params", "k", {"values": {"a": "2"}})  # parameters never change
    put_step(spool, 1)
    assert spool.num_waiting == 0
    assert steps_of(client, spool) == [1]


def test_a_deleted_experiment_is_named_and_blocks_no_other_run(
    client: MlflowClient, folder: RunFolder
) -> None:
    client.delete_experiment(client.create_experiment(folder.name))
    sentence = f"takes no run in the experiment '{folder.name}': .* deleted; restore the"
    with pytest.raises(ConfigError, match=sentence), open_tracking(settings_for(folder), folder):
        pass
    assert Spool.unfinished(folder.root, client) == []


def test_a_child_of_a_refused_run_stands_alone(client: MlflowClient, tmp_path: Path) -> None:
    """The experiment was deleted while MLflow was away, and restored later."""
    deleted = client.create_experiment("restored")
    client.delete_experiment(deleted)
    spool = Spool(tmp_path, client)
    put_run(spool, "restored")
    with pytest.raises(TrackingError, match=r"refused this run \(.* deleted\)"):
        spool.run_id("k", patience_s=0)
    client.restore_experiment(deleted)
    put_run(spool, "restored", key="child", parent="k")
    spool.end_orphans()
    child = client.get_run(spool.run_id("child", patience_s=0))
    assert child.info.status == "KILLED" and "mlflow.parentRunId" not in child.data.tags


@pytest.mark.parametrize(
    "uri",
    [
        "http://me:planted-secret@127.0.0.1:9",
        "postgresql+psycopg://me:a/planted-secret@db/x",
        "postgresql+psycopg://me@corp:planted-secret@db/x",
        "postgresql+psycopg://me:p@planted-secret?x@db/x",
        "postgresql+psycopg://db/x?user=me&password=planted-secret",
        "mssql+pyodbc:///?odbc_connect=Driver%3DX%3BPWD%3Dplanted-secret",
        "https://mlflow/?Access_Token=planted-secret#x",
    ],
)
def test_a_password_is_refused_in_settings(uri: str) -> None:
    with pytest.raises(ValidationError, match="the address holds a password") as caught:
        TrackingConfig(uri=uri)
    assert "planted-secret" not in first_problem(caught.value)
    assert "planted-secret" not in without_secrets(f"no answer from {uri} now")


@pytest.mark.parametrize(
    "uri",
    [
        "http://mlflow:5000",
        "sqlite:////data/a:b@c/mlflow.db",
        "postgresql+psycopg://me@db:5432/x?sslmode=require&sslkey=/etc/secrets/key",
    ],
)
def test_an_address_without_a_password_is_a_setting(uri: str) -> None:
    assert TrackingConfig(uri=uri).uri == uri


@pytest.mark.parametrize(
    "uri", ["http://me:planted-secret@127.0.0.1:9", "http://me:a/planted-secret@127.0.0.1:9"]
)
def test_a_password_of_the_environment_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], uri: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    spool = Spool(tmp_path, tracking_client(TrackingConfig(), tmp_path))
    put_run(spool, "secret")
    with pytest.raises(TrackingError, match=r"me:\*\*\*@127") as error:
        spool.run_id("k", patience_s=0)
    assert "planted-secret" not in str(error.value) + "".join(capfd.readouterr())
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or b"planted-secret" not in file.read_bytes()


def test_two_processes_make_one_database(tmp_path: Path) -> None:
    """Both find none; MLflow's own migrations would trip over each other."""
    make = "import pathlib, sys; from tasks.tracking.run import *; from configs.settings import *; "
    make += "tracking_client(TrackingConfig(), pathlib.Path(sys.argv[1])).search_experiments()"
    command = [sys.executable, "-c", make, str(tmp_path)]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    ends = [(process.communicate(timeout=120)[1], process.returncode) for process in both]
    assert [code for _, code in ends] == [0, 0], ends


def put_run(spool: Spool, name: str, *, key: str = "k", parent: str | None = None) -> None:
    values = {"experiment": name, "artifacts": None, "name": name, "tags": {}, "parent": parent}
    spool.put("create", key, {"at_ms": now_ms(), **values})


def put_step(spool: Spool, step: int) -> None:
    spool.put("metrics", "k", {"rows": [["loss", 1.0, now_ms(), step]]})


def steps_of(client: MlflowClient, spool: Spool) -> list[int]:
    run_id = spool.run_id("k", patience_s=0)
    return [point.step for point in client.get_metric_history(run_id, "loss")]
