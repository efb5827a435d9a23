"""``dflash-flow run`` when the gate rejects everything: exit code 3, and what was found."""

import json
import os

import pytest

from flows.cli import EXIT_REJECTED
from flows.cli.run import QUIET, run_settings
from tests.flows.conftest import MakeSettings


@pytest.mark.usefixtures("prefect_server")
def test_a_rejected_run_ends_with_code_3_and_shows_what_it_found(
    tiny_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("tasks.console._console", [])
    for name, value in QUIET.items():
        monkeypatch.setenv(name, os.environ.get(name, value))
    settings = tiny_settings(run={"name": "in-vain"}, gate={"min_ktok_s": 1e6})

    assert run_settings(settings, as_json=True) == EXIT_REJECTED == 3
    shown = json.loads(capsys.readouterr().out)
    assert shown["gate"]["chosen"] is None and shown["training"] is None
    assert all("threshold 1,000,000: rejected" in v["reason"] for v in shown["gate"]["verdicts"])

    assert run_settings(settings) == EXIT_REJECTED
    shown = capsys.readouterr().out
    assert "none of sorted/diverse, random/diverse, bucketed/diverse passes the gate" in shown
    assert str(settings.run.root / "in-vain" / "report.html") in shown
