"""Time limits of torchrun: what is quiet or slow is ended, and may save first."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.settings import RunConfig
from dflash_core.errors import TimeLimitError
from tasks.launching.torchrun import run_torchrun
from tasks.launching.watching import Watch
from tests.tasks.launching.test_torchrun import TOY, no_rank_lives

CHILD = """
import pathlib, signal, sys, time
def save(number, frame):
    pathlib.Path(sys.argv[1], "saved").touch()
    sys.exit(1)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(300)
"""
LIMITS = {
    "torchrun_limit_s": "torchrun ran longer than 0.1 s (run.torchrun_limit_s) and was ended",
    "silence_limit_s": "finished a step for 0.1 s (run.silence_limit_s), and torchrun was ended",
}


@pytest.mark.parametrize("setting", LIMITS)
def test_what_takes_too_long_may_save_and_is_ended(tmp_path: Path, setting: str) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        watch = Watch(child, [tmp_path / "metrics.jsonl"], RunConfig.model_validate({setting: 0.1}))
        assert child.wait(60) == 1
        watch.stop()
    assert LIMITS[setting] in watch.reached
    assert (tmp_path / "saved").exists()


def test_files_that_are_written_are_signs_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(
        "tasks.launching.watching.time", SimpleNamespace(monotonic=lambda: clock.now)
    )
    monkeypatch.setattr("tasks.launching.watching.POLL_S", 3600.0)  # it looks when it is told to
    file = tmp_path / "metrics.jsonl"
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        watch = Watch(child, [tmp_path / "other", file], RunConfig(silence_limit_s=2.5))
        for step in range(5):
            file.write_text("as long as before")
            os.utime(file, (step, step))
            clock.now += 2.0
            watch.look()
            assert watch.reached == ""
        clock.now += 2.6
        watch.look()
        watch.stop()
    assert "for 2.5 s (run.silence_limit_s)" in watch.reached


def test_a_launch_that_could_not_save_says_which_limit_ended_it(tmp_path: Path) -> None:
    config = RunConfig(torchrun_limit_s=0.1)
    with pytest.raises(TimeLimitError, match=r"longer than 0.1 s .* or raise the limit") as caught:
        run_torchrun(TOY, [str(tmp_path), "wait"], num_ranks=2, run_dir=tmp_path, config=config)
    assert "\n" not in str(caught.value)
    assert no_rank_lives(tmp_path)
