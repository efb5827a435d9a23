"""Pilots of a real flow: short trainings decide where predictions cannot."""

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_core.calibration.program import fingerprint
from dflash_core.training.config import TrainingJob
from flows.plan_batches import plan_batches
from tests.dflash_core.throughput.machines import machine
from tests.flows.conftest import MakeSettings


@pytest.mark.integration
@pytest.mark.usefixtures("prefect_server")
def test_pilots_decide_between_strategies_that_are_predicted_alike(
    tiny_settings: MakeSettings, tmp_path: Path
) -> None:
    file = tmp_path / "cost.json"
    settings = tiny_settings(
        run={"name": "pilots", "calibration": file},
        compare={"strategies": ["sorted", "bucketed"]},
        gate={"min_share_of_best": 0.5, "pilot_steps": 10},
        training={"epochs": 9},
    )
    job = TrainingJob(
        run_dir=tmp_path,
        store=tmp_path,
        target=settings.target,
        draft=settings.draft,
        loss=settings.loss,
        training=settings.training,
    )
    unsure = machine(fingerprint=fingerprint(job), correction_error=2.0)
    file.write_text(unsure.model_dump_json())

    state = plan_batches(settings, return_state=True)
    assert state.is_completed(), state.message
    summary: Any = state.result()

    folder = settings.run.root / "pilots"
    for name, verdict in zip(("sorted", "bucketed"), summary.gate.verdicts, strict=True):
        assert "Ktok/s in a pilot (" in verdict.reason
        lines = (folder / f"pilot-{name}-diverse" / "metrics.jsonl").read_text().splitlines()
        assert json.loads(lines[-1])["step"] == len(lines) == 10
    assert summary.gate.pilots == ()
    assert not (folder / "training").exists()

    files = sorted(folder.glob("pilot-*/metrics.jsonl"))
    before = [file.read_bytes() for file in files]
    repeated: Any = plan_batches(settings)
    assert [file.read_bytes() for file in files] == before, "what was measured is kept"
    assert repeated.gate == summary.gate
