"""Ctrl-C from a terminal, at real programs: answered at once, with 4, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows.cli import EXIT_INTERRUPTED
from flows.cli.interrupts import INTERRUPTS, MAKING_A_TASK_RUN
from tests.tasks.launching.test_torchrun import alive, eventually

ROOT = Path(__file__).parents[3]
PROGRAM = """
import os, subprocess, sys, threading, time, signal
import flows.cli, flows.cli.convert as command
def ready():
    print("ready", flush=True)
def work(_):
{work}
command.run = work
sys.argv = ["dflash-flow", "convert", "x", "--out", "y"]
sys.exit(flows.cli.main())
"""
STOPPING = (
    "dflash-flow: stopping, and saving what can be saved; Ctrl-C again ends at once\n"
    "dflash-flow: interrupted\n"
)
POLARS = "import polars; polars.LazyFrame({'a': [1]}).collect(); ready()"
WAITS = {
    "a pipe": f"{POLARS}; os.read(os.pipe()[0], 1)",
    "a lock": f"{POLARS}; lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "a sleep": "ready(); time.sleep(99)",
}
WAYS = [("a pipe", signal.SIGINT), ("a lock", signal.SIGINT), ("a sleep", signal.SIGTERM)]


@pytest.mark.parametrize(("wait", "number"), [*WAYS, ("a sleep", signal.SIGHUP)])
def test_every_wait_ends_even_after_polars_has_run(wait: str, number: signal.Signals) -> None:
    program = start(WAITS[wait])
    os.killpg(program.pid, number)
    said = program.communicate(timeout=60)
    assert (program.returncode, *said) == (EXIT_INTERRUPTED, "", STOPPING)


def test_an_import_is_not_cut_in_its_middle(tmp_path: Path) -> None:
    """Some libraries make another error of it, or none, and are broken from then on."""
    text = "import time\nprint('ready', flush=True)\ntry: time.sleep(1)\nexcept BaseException: pass"
    (tmp_path / "heavy.py").write_text(text)
    program = start(
        "import heavy; print('whole'); time.sleep(99)  # ready", PYTHONPATH=str(tmp_path)
    )
    os.killpg(program.pid, signal.SIGINT)
    said = program.communicate(timeout=60)
    assert (program.returncode, *said) == (EXIT_INTERRUPTED, "whole\n", STOPPING)


def test_an_interrupt_lost_in_a_callback_of_native_code_comes_again() -> None:
    """Numba's compiler calls back, and what is raised there is dropped."""
    program = start(
        "import ctypes\n"
        "    ctypes.CFUNCTYPE(None)(lambda: (ready(), time.sleep(9)))(); time.sleep(99)"
    )
    os.killpg(program.pid, signal.SIGINT)
    said = program.communicate(timeout=60)
    assert (program.returncode, *said) == (EXIT_INTERRUPTED, "", STOPPING)


def test_a_task_run_is_made_whole_so_that_it_can_be_called_crashed() -> None:
    """Prefect makes ``ValueError: Task run is not set`` of an interrupt that comes too early."""
    program = start(
        f"def {MAKING_A_TASK_RUN}(): ready(); time.sleep(1); print('whole')\n"
        f"    {MAKING_A_TASK_RUN}(); time.sleep(99)"
    )
    os.killpg(program.pid, signal.SIGINT)
    said = program.communicate(timeout=60)
    assert (program.returncode, *said) == (EXIT_INTERRUPTED, "whole\n", STOPPING)


def test_what_prefect_makes_of_an_interrupt_is_an_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from prefect import task_engine
    from prefect.states import Failed

    from flows.cli.run import explain

    assert hasattr(task_engine, MAKING_A_TASK_RUN)
    monkeypatch.setattr(INTERRUPTS, "asked", True)
    with pytest.raises(KeyboardInterrupt):
        explain(Failed(data=ValueError("Task run is not set")))


def test_before_a_command_has_begun_it_ends_at_once(tmp_path: Path) -> None:
    """While a dataclass is made, which CPython would remember, and whatever swallows it."""
    interrupt = "import os; os.kill(os.getpid(), 2); import time; time.sleep(99)"
    (tmp_path / "rich.py").write_text(f"exec({interrupt!r})")
    command = [sys.executable, "-m", "flows.cli", "runs"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (EXIT_INTERRUPTED, "dflash-flow: interrupted\n")


def test_the_second_ctrl_c_ends_what_cannot_end(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    program = start(
        "child = subprocess.Popen(['sleep', '999'], stdout=2, start_new_session=True)\n"
        f"    open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "    try: ready(); time.sleep(99)\n"
        "    finally: ready(); time.sleep(99)"
    )
    os.killpg(program.pid, signal.SIGINT)
    assert program.stdout is not None and program.stdout.readline() == "ready\n"
    time.sleep(0.6)  # sooner it would be the same one, passed on by a wrapper
    os.killpg(program.pid, signal.SIGINT)
    assert program.communicate(timeout=60)[1].endswith("ended before everything was saved\n")
    assert program.returncode == EXIT_INTERRUPTED
    assert eventually(lambda: not alive(int(pid.read_text())))


def test_the_end_waits_for_who_asked_but_not_for_the_interpreter_to_tidy_up() -> None:
    """Which takes half a minute with Prefect, MLflow and PyTorch on a busy machine."""
    program = start(
        "import atexit; atexit.register(print, 'asked')\n"
        "    class Heavy: __del__ = lambda self: print('tidied')\n"
        "    sys.modules['heavy'] = Heavy(); ready(); time.sleep(99)"
    )
    os.killpg(program.pid, signal.SIGINT)
    said = program.communicate(timeout=60)
    assert (program.returncode, *said) == (EXIT_INTERRUPTED, "asked\n", STOPPING)


def test_what_ignores_interrupts_goes_on_ignoring_them() -> None:
    """As nohup has it, and a shell script for what it starts in the background."""
    program = start("os.kill(os.getpid(), 1); print('alive')", ignoring=signal.SIGHUP)
    said = program.communicate(timeout=60)
    assert (program.returncode, *said) == (0, "alive\n", "")


def start(work: str, ignoring: signal.Signals | None = None, **env: str) -> "subprocess.Popen[str]":
    """Start a command in a session of its own, as a terminal does, and wait until it is ready."""
    deaf = "" if ignoring is None else f"import signal; signal.signal({int(ignoring)}, 1)"
    program = subprocess.Popen(
        [sys.executable, "-c", deaf + PROGRAM.format(work=f"    {work}")],
        cwd=ROOT,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    if "ready" in work:
        assert program.stdout is not None and program.stdout.readline() == "ready\n"
    return program
