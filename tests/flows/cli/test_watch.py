"""``dflash-flow watch`` on run folders written by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_core.training.telemetry.status import RunLog
from flows.cli import main


def step_line(step: int, **more: Any) -> str:
    line = {
        "step": step,
        "num_steps": 40,
        "epoch": 0,
        "epoch_progress": step / 40,
        "loss": 5.0 / step,
        "grad_norm": 0.5,
        "learning_rate": 1e-3,
        "skipped_steps": 0,
        "real_tokens": 900,
        "token_slots": 1000,
        "supervised_tokens": 300,
        "step_s": 0.5,
        "wait_s": 0.05,
        "busy_shares": {"prefetch": 0.02, "target": 0.9, "draft": 0.4},
        "queue_depths": {"prefetch": 2.0, "features": 0.0},
        "bottleneck": "target",
        "peak_memory_bytes": 1 << 30,
        **more,
    }
    return json.dumps(line) + "\n"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "bold-otter" / "training"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(step_line(step) for step in range(1, 31)))
    tell(folder, "running")
    return folder


def tell(folder: Path, state: str, reason: str = "") -> None:
    status = {"state": state, "step": 30, "num_steps": 40, "reason": reason}
    (folder / "status.json").write_text(json.dumps(status))


def test_the_view_names_the_bottleneck_and_what_is_left(run_dir: Path, capsys: Any) -> None:
    assert main(["watch", str(run_dir.parent), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "bold-otter  running  step 30 of 40" in shown
    assert "0:00:05 left" in shown
    assert "target 90%" in shown
    assert "bottleneck target" in shown


def test_forgotten_lengths_and_a_failure_are_shown_in_words(run_dir: Path, capsys: Any) -> None:
    more = {"held_out_loss": 2.5, "forgotten_groups": [1], "length_edges": [10, 90, 400]}
    with (run_dir / "metrics.jsonl").open("a") as stream:
        stream.write(step_line(31, grad_norm=None, loss=None, **more))
    tell(run_dir, "failed", "the loss was not finite in 6 steps in a row")
    main(["watch", str(run_dir), "--once"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "samples of 11 to 90 tokens get worse" in shown
    assert "failed" in shown
    assert "not finite in 6 steps" in shown


def test_json_is_one_object(run_dir: Path, capsys: Any) -> None:
    main(["watch", str(run_dir), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["status"]["state"], found["last_step"]["step"]) == ("running", 30)


def test_a_folder_without_a_run_is_bad_input(tmp_path: Path, capsys: Any) -> None:
    assert main(["watch", str(tmp_path)]) == 2
    assert "holds no training run" in capsys.readouterr().err


def test_the_log_follows_appends_half_lines_and_a_resumed_run(run_dir: Path) -> None:
    log = RunLog(run_dir)
    log.refresh()
    file = run_dir / "metrics.jsonl"
    whole = step_line(31)
    with file.open("a") as stream:
        stream.write(whole[:20])
    log.refresh()
    assert log.steps[-1]["step"] == 30
    with file.open("a") as stream:
        stream.write(whole[20:])
    log.refresh()
    assert [step["step"] for step in log.steps] == list(range(1, 32))
    anew = run_dir / "anew"
    anew.write_text("".join(step_line(step) for step in range(1, 6)))
    anew.replace(file)
    log.refresh()
    assert [step["step"] for step in log.steps] == list(range(1, 6))
