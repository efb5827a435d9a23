"""Processes that die, fail or are slow, at any moment of their lives."""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from dflash_core.corpus.preparing.workers import WorkerDied, Workers

ROOT = Path(__file__).parents[4]
LARGE = b"x" * (1 << 20)  # No pipe holds as much.


def _start(folder: Path, die: bool = False):
    if die:
        os._exit(1)

    def work(name: str, content: bytes = b"", failure: Exception | None = None) -> None:
        if name == "die":
            os._exit(1)
        if name == "wait":
            time.sleep(3_600)
        while name == "wait until told" and not (folder / "told").exists():
            time.sleep(0.01)
        if failure is not None:
            raise failure
        (folder / name).write_bytes(content)

    return work


def test_calls_are_done_by_processes_and_failures_are_what_was_raised(tmp_path: Path) -> None:
    with closing(Workers(2, _start, tmp_path)) as pool:
        done = [pool.submit(str(k), LARGE) for k in range(5)]
        failed = pool.submit("y", b"", OSError(28, "No space left on device", "y"))
        after = pool.submit("z")
        assert [future.result() for future in [*done, after]] == [None] * 6
        with pytest.raises(OSError, match="No space left on device: 'y'"):
            failed.result()
        assert len(active_children()) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "2", "3", "4", "z"}
    assert not active_children()


@pytest.mark.parametrize("die", [True, False])
def test_process_that_dies_is_told(tmp_path: Path, die: bool) -> None:
    """At its start a call waits in the pipe, more than that holds; later its answer is missing."""
    with closing(Workers(1, _start, tmp_path, die)) as pool:
        futures = [pool.submit("die", LARGE), pool.submit("x", LARGE)]
        for future in futures:
            with pytest.raises(WorkerDied):
                future.result(timeout=60)


def test_process_killed_while_another_starts_is_told(tmp_path: Path, monkeypatch) -> None:
    start = BaseProcess.start

    def kill_and_start(process: BaseProcess) -> None:
        for other in active_children():
            assert other.pid is not None
            os.kill(other.pid, signal.SIGKILL)
            other.join()
            time.sleep(0.2)  # for whoever watches to see it
        start(process)

    monkeypatch.setattr(BaseProcess, "start", kill_and_start)
    with closing(Workers(2, _start, tmp_path)) as pool:
        killed, later = pool.submit("wait", LARGE), pool.submit("x", LARGE)
        assert isinstance(killed.exception(timeout=60), WorkerDied)
        error = later.exception(timeout=60)
    assert isinstance(error, WorkerDied) or (tmp_path / "x").read_bytes() == LARGE


def test_calls_not_begun_are_left_when_the_pool_is_closed(tmp_path: Path) -> None:
    pool = Workers(1, _start, tmp_path)
    begun = pool.submit("wait until told")
    futures = [pool.submit(str(k)) for k in range(5)]
    while not begun.running():
        time.sleep(0.01)
    futures[-1].add_done_callback(lambda _: (tmp_path / "told").touch())
    pool.close()
    assert begun.result() is None
    assert all(future.cancelled() for future in futures)
    assert {path.name for path in tmp_path.iterdir()} == {"told", "wait until told"}


def test_processes_are_deaf_to_interrupts_the_first_of_a_program_too(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal\n"
        "from contextlib import closing\n"
        "from dflash_core.corpus.preparing.workers import Workers\n"
        "def start(): return lambda: os.kill(os.getpid(), signal.SIGINT)\n"
        "if __name__ == '__main__':\n"
        "    with closing(Workers(2, start)) as pool:\n"
        "        for done in [pool.submit() for _ in range(4)]: done.result()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(program)], env=environment, check=True, timeout=240)
