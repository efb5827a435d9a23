"""Real torchrun: followed live, blamed correctly, and gone whatever happens to its parent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from dflash_core.errors import TrainingError
from dflash_core.training.telemetry.metrics import MetricsFile
from dflash_core.training.telemetry.status import read_status
from tasks.launching.launch import Launch, start
from tasks.launching.torchrun import FULL, MetricsTail, run_torchrun

ROOT = Path(__file__).resolve().parents[3]
TOY = "tests.tasks.launching.toy_rank"


def test_lines_and_steps_arrive_and_arguments_stay_with_the_module(tmp_path: Path) -> None:
    """What looks like an option of torchrun is only ever an argument of the rank."""
    lines: list[str] = []
    steps: list[dict[str, Any]] = []
    run_torchrun(
        TOY,
        [str(tmp_path), "end", "--nproc-per-node=7", "$(reboot)"],
        num_ranks=2,
        run_dir=tmp_path,
        on_line=lines.append,
        on_metrics=steps.extend,
    )
    said = sorted(line for line in lines if line.startswith("rank"))
    assert said == [f"rank {r} got ('--nproc-per-node=7', '$(reboot)')" for r in (0, 1)]
    assert [step["step"] for step in steps] == [1, 2, 3]


@pytest.mark.parametrize("keep_steps", [0, 40])
def test_steps_of_an_earlier_attempt_are_not_the_runs_own(tmp_path: Path, keep_steps: int) -> None:
    write_steps(tmp_path, range(1, 61), keep_steps=0, attempt=1)
    steps: list[dict[str, Any]] = []
    tail = MetricsTail(tmp_path / "metrics.jsonl", steps.extend)
    tail.read()
    assert steps == [], "the ranks have not begun yet"
    write_steps(tmp_path, range(keep_steps + 1, 71), keep_steps=keep_steps, attempt=2)
    tail.read()
    assert [step["step"] for step in steps] == list(range(1, 71))
    assert [step["attempt"] for step in steps] == [1] * keep_steps + [2] * (70 - keep_steps)


def test_the_guilty_rank_is_quoted_not_its_peer(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="ValueError: the guilty rank speaks") as caught:
        run_torchrun(TOY, [str(tmp_path), "fail"], num_ranks=2, run_dir=tmp_path)
    assert "\n" not in str(caught.value)
    assert no_rank_lives(tmp_path)


@pytest.mark.integration
def test_a_rank_that_the_kernel_killed_is_one_sentence_with_a_setting(tmp_path: Path) -> None:
    with pytest.raises(
        TrainingError, match=r"calibration failed.*: a rank was killed .* -9"
    ) as told:
        run_torchrun(TOY, [str(tmp_path), "die"], num_ranks=2, run_dir=tmp_path, what="calibration")
    assert "lower batching.token_budget" in str(told.value)


def test_a_full_disk_is_known_by_what_python_and_safetensors_say() -> None:
    assert FULL.search("OSError: [Errno 28] No space left on device")
    assert FULL.search("I/O error: No space left on device (os error 28)")
    assert not FULL.search("checkpoint at step 4 was not written (No space left on device)")


def test_sigterm_to_the_launcher_is_an_interruption_that_can_be_resumed(tmp_path: Path) -> None:
    parent = start_parent(tmp_path)
    wait_until_ranks_wait(tmp_path)
    (launcher,) = children_of(parent.pid)
    os.kill(launcher, signal.SIGTERM)
    output, _ = parent.communicate(timeout=60)
    assert "Interrupted: stopped on request after step 2 of 3" in output
    assert no_rank_lives(tmp_path)


def test_ctrl_c_at_the_terminal_lets_the_ranks_save(tmp_path: Path) -> None:
    """It is sent to all of the terminal's processes, and after Polars it ends no read of ours."""
    parent = start_parent(tmp_path)
    wait_until_ranks_wait(tmp_path)
    os.killpg(parent.pid, signal.SIGINT)
    output, _ = parent.communicate(timeout=60)
    assert "KeyboardInterrupt: stopped after step 2 of 3; the same command continues" in output
    assert no_rank_lives(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_death_of_the_parent_ends_every_rank_within_seconds(
    tmp_path: Path, number: signal.Signals
) -> None:
    parent = start_parent(tmp_path)
    wait_until_ranks_wait(tmp_path)
    parent.send_signal(number)
    parent.communicate(timeout=60)
    assert eventually(lambda: no_rank_lives(tmp_path))
    status = read_status(tmp_path)
    assert status is not None and status.state == "interrupted", "they had time to save"


def test_ranks_of_a_killed_parent_are_gone_before_others_start_in_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They still save for some seconds, and who looks for the lock of the parent finds it free."""
    parent = start_parent(tmp_path)
    wait_until_ranks_wait(tmp_path)
    earlier = [int(file.name.partition("-")[2]) for file in tmp_path.glob("waiting-*")]
    lived: list[bool] = []

    def start_others(launch: Launch, *, holding: Collection[int]) -> "subprocess.Popen[bytes]":
        lived.extend(alive(pid) for pid in earlier)
        return start(launch, holding=holding)

    monkeypatch.setattr("tasks.launching.torchrun.start", start_others)
    parent.kill()
    run_torchrun(TOY, [str(tmp_path), "end"], num_ranks=2, run_dir=tmp_path)
    assert lived == [False, False]
    parent.communicate()


def test_a_launcher_whose_parent_died_while_it_started_starts_no_rank(tmp_path: Path) -> None:
    """The kernel tells of a death only whom it was asked to tell before."""
    code = (
        "import os, sys\n"
        "from tasks.launching.launch import Launch, start\n"
        f"launch = Launch(module={TOY!r}, arguments=(sys.argv[1], 'wait'), num_ranks=2)\n"
        "os.write(1, str(start(launch).pid).encode())\n"
        "os._exit(0)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    launcher = int(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
    assert eventually(lambda: not alive(launcher), timeout_s=60)
    assert list(tmp_path.iterdir()) == []


def test_a_callback_that_fails_takes_the_ranks_with_it(tmp_path: Path) -> None:
    def on_line(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_torchrun(TOY, [str(tmp_path), "wait"], num_ranks=2, run_dir=tmp_path, on_line=on_line)
    assert no_rank_lives(tmp_path)


def write_steps(run_dir: Path, steps: range, *, keep_steps: int, attempt: int) -> None:
    metrics = MetricsFile(run_dir, keep_steps=keep_steps)
    for step in steps:
        metrics.write({"step": step, "attempt": attempt})
    metrics.close()


def start_parent(run_dir: Path) -> "subprocess.Popen[str]":
    code = (
        "import pathlib, sys, polars\n"
        "from tasks.launching.torchrun import run_torchrun, Interrupted\n"
        "polars.LazyFrame({'a': [1]}).collect()\n"
        "run_dir = pathlib.Path(sys.argv[1])\n"
        f"try: run_torchrun({TOY!r}, [str(run_dir), 'wait'], num_ranks=2, run_dir=run_dir)\n"
        "except Interrupted as error: print(f'Interrupted: {error}')\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, str(run_dir)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_until_ranks_wait(run_dir: Path) -> None:
    assert eventually(lambda: len(list(run_dir.glob("waiting-*"))) == 2, timeout_s=120)


def children_of(pid: int) -> list[int]:
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def no_rank_lives(run_dir: Path) -> bool:
    return not any(alive(int(file.read_text())) for file in run_dir.glob("rank*.pid"))


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be collected is dead."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def eventually(condition: Any, *, timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return bool(condition())
