"""Ctrl-C in a terminal during each stage of a run: it ends with 4, and so does what it began."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dflash_core.training.progress import read_status
from flows.cli import EXIT_INTERRUPTED
from tests.flows.conftest import MakeSettings
from tests.integration.places import ROOT, steps_done, wait_for
from tests.tasks.test_torchrun import alive

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

Begun = Callable[[str, Path], object]
STAGES: dict[str, tuple[signal.Signals, Begun]] = {
    "load": (signal.SIGINT, lambda told, training: not told),
    "prepare": (signal.SIGINT, lambda told, training: "target:" in told),
    "calibrate": (signal.SIGINT, lambda told, training: "buckets:" in told),
    "train": (signal.SIGINT, lambda told, training: steps_done(training)),
    "train-sigterm": (signal.SIGTERM, lambda told, training: steps_done(training)),
    "evaluate": (signal.SIGINT, lambda told, training: state_of(training) == "finished"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_ends_with_all_that_it_started(
    tmp_path: Path, runs: Path, tiny_settings: MakeSettings, stage: str
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
            env={**os.environ, "PREFECT_HOME": str(tmp_path)},
            start_new_session=True,
        )
    wait_for(lambda: begun(told.read_text(), training), timeout_s=600, what=stage)
    started = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, number)
    assert process.wait(240) == EXIT_INTERRUPTED, told.read_text()
    # What nobody collects is dead too: the first process of a container may never do so.
    left = psutil.wait_procs(started, timeout=60)[1]
    assert not [child for child in left if alive(child.pid)]
    assert "Traceback" not in told.read_text()
    assert stage == "load" or {"Crashed"} <= states(tmp_path) <= {"Crashed", "Completed"}
    if stage == "train":
        assert "stopped after step" in told.read_text()
    if "train" in stage:
        assert list((training / "checkpoints").glob("step-*"))


def state_of(training: Path) -> str:
    status = read_status(training)
    return "" if status is None else status.state


def states(prefect_home: Path) -> set[str]:
    """Return the states in which flow and task runs were left."""
    with sqlite3.connect(prefect_home / "prefect.db") as database:
        found = "SELECT state_name FROM flow_run UNION SELECT state_name FROM task_run"
        return {name for (name,) in database.execute(found)}
