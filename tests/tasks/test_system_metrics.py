"""The machine's load reaches MLflow, where its page looks for it."""

import time
from pathlib import Path

from configs.settings import RunConfig, Settings
from dflash_core.target.config import TargetConfig
from tasks.run_folder import open_run_folder
from tasks.system_metrics import system_metrics
from tasks.tracking import open_tracking


def test_samples_are_recorded_while_a_run_trains(tmp_path: Path) -> None:
    settings = Settings(target=TargetConfig(path=Path("toy")), run=RunConfig(root=tmp_path))
    with (
        open_run_folder(settings.run, default_name="run") as folder,
        open_tracking(settings, folder) as run,
    ):
        with system_metrics(run, every_s=0.1):
            time.sleep(0.5)
        recorded = run.client.get_run(run.run_id).data.metrics
        history = run.client.get_metric_history(run.run_id, "system/cpu_utilization_percentage")
    assert len(history) > 1
    assert recorded["system/system_memory_usage_megabytes"] > 0
    assert any(name.startswith("system/network_") for name in recorded)
