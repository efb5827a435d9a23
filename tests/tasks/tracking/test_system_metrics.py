"""The machine's load reaches MLflow, where its page looks for it."""

import time
from pathlib import Path
from typing import Any

import pytest

from configs.settings import RunConfig, Settings
from dflash_core.target.config import TargetConfig
from tasks.places.run_folder import open_run_folder
from tasks.tracking.run import TrackedRun, open_tracking
from tasks.tracking.system_metrics import system_metrics
from tests.tasks.launching.test_torchrun import eventually


def test_samples_are_recorded_while_a_run_trains(tmp_path: Path) -> None:
    settings = Settings(target=TargetConfig(path=Path("toy")), run=RunConfig(root=tmp_path))
    with (
        open_run_folder(settings.run, default_name="run") as folder,
        open_tracking(settings, folder) as run,
    ):
        with system_metrics(run, every_s=0.1):
            assert eventually(lambda: len(history_of(run)) > 1, timeout_s=200)
        recorded = run.client.get_run(run.run_id).data.metrics
    assert recorded["system/system_memory_usage_megabytes"] > 0
    assert any(name.startswith("system/network_") for name in recorded)


def history_of(run: TrackedRun) -> list[Any]:
    return run.client.get_metric_history(run.run_id, "system/cpu_utilization_percentage")


class FullDisk(TrackedRun):
    """A run whose messages cannot be written down."""

    def __init__(self) -> None:
        """Without a spool: nothing else is asked of it."""

    def log_metrics(self, values: Any, *, step: int = 0) -> None:
        raise OSError(28, "No space left on device")


def test_samples_that_cannot_be_kept_end_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with system_metrics(FullDisk(), every_s=0.01):
        assert eventually(lambda: caplog.text)
        time.sleep(0.05)
    assert caplog.text.count("no more system metrics are recorded: [Errno 28] No space left") == 1
