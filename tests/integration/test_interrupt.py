"""Ctrl-C in a terminal during each stage of a run: it ends with 4, and so does what it began."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dflash_core.training.telemetry.status import read_status
from flows.cli import EXIT_INTERRUPTED
from tests.flows.conftest import MakeSettings
from tests.integration.places import ROOT, steps_done, wait_for
from tests.tasks.launching.test_torchrun import alive

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

Begun = Callable[[str, Path], object]
STAGES: dict[str, tuple[signal.Signals, Begun]] = {
    "load": (signal.SIGINT, lambda told, training: True),
    "prepare": (signal.SIGINT, lambda told, training: "target:" in told),
    "profile": (signal.SIGINT, lambda told, training: "corpus:" in told),
    "calibrate": (signal.SIGINT, lambda told, training: "buckets:" in told),
    "compare": (signal.SIGINT, lambda told, training: "calibration:" in told),
    "train": (signal.SIGINT, lambda told, training: steps_done(training)),
    "train-sigterm": (signal.SIGTERM, lambda told, training: steps_done(training)),
    "evaluate": (signal.SIGINT, lambda told, training: state_of(training) == "finished"),
}


@pytest.fixture(scope="module")
def prefect_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all cases, whose server makes its database once."""
    return tmp_path_factory.mktemp("prefect")


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_ends_with_all_that_it_started(
    tmp_path: Path, runs: Path, prefect_home: Path, tiny_settings: MakeSettings, stage: str
) -> None:
    number, begun = STAGES[stage]
    epochs = 1 if stage == "evaluate" else 300
    settings = tiny_settings(run={"root": runs, "name": stage}, training={"epochs": epochs})
    sections = settings.model_dump(mode="json", exclude_unset=True)
    words = [word for name, given in sections.items() for word in (f"--{name}", json.dumps(given))]
    told, training = tmp_path / "told", runs / stage / "training"
    with told.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "run", "--config", "configs/tiny.toml", *words],
            cwd=ROOT,
            stderr=stream,
            env={**os.environ, "PREFECT_HOME": str(prefect_home)},
            start_new_session=True,
        )
    wait_for(lambda: listens(process.pid), what="the program")
    wait_for(lambda: begun(told.read_text(), training), timeout_s=600, what=stage)
    started = psutil.Process(process.pid).children(recursive=True)
    # A terminal signals all its processes; `kill` and a container's end, the first one.
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    assert process.wait(240) == EXIT_INTERRUPTED, told.read_text()
    # What nobody collects is dead too: the first process of a container may never do so.
    left = psutil.wait_procs(started, timeout=60)[1]
    assert not [child for child in left if alive(child.pid)]
    assert "Traceback" not in told.read_text()
    if stage == "load":
        return
    (flow_state,), *tasks = states(prefect_home)
    assert flow_state == "Crashed" and set(tasks) <= {("Crashed",), ("Completed",)}
    if stage != "prepare":  # whose run in MLflow may not have been made
        assert status_in_mlflow(runs, stage) == [("KILLED",)]
    if stage == "train":
        assert "stopped after step" in told.read_text()
    if "train" in stage:
        assert list((training / "checkpoints").glob("step-*"))


def listens(pid: int) -> bool:
    """Whether a program catches SIGTERM, which Python does not by itself."""
    (mask,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


def state_of(training: Path) -> str:
    status = read_status(training)
    return "" if status is None else status.state


def states(prefect_home: Path) -> list[tuple[str]]:
    """Return the states in which the newest flow run and its task runs were left."""
    last = "(SELECT id FROM flow_run ORDER BY created DESC LIMIT 1)"
    with sqlite3.connect(prefect_home / "prefect.db") as database:
        return [
            *database.execute(f"SELECT state_name FROM flow_run WHERE id = {last}"),  # noqa: S608
            *database.execute(
                f"SELECT state_name FROM task_run WHERE flow_run_id = {last}"  # noqa: S608
            ),
        ]


def status_in_mlflow(runs: Path, name: str) -> list[tuple[str]]:
    with sqlite3.connect(runs / "mlflow" / "mlflow.db") as database:
        found = database.execute("SELECT status FROM runs WHERE name = ?", [name])
        return list(found)
