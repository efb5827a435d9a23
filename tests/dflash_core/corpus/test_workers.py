"""Processes that die, fail or are slow, at any moment of their lives."""

import os
import signal
import time
from contextlib import closing
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from dflash_core.corpus.workers import WorkerDied, Workers
from dflash_core.errors import DFlashError

LARGE = b"x" * (1 << 20)  # No pipe holds as much.


def _start(folder: Path, die: bool = False):
    if die:
        os._exit(1)

    def work(name: str, content: bytes = b"", failure: Exception | None = None) -> None:
        if name == "die":
            os._exit(1)
        if name == "wait":
            time.sleep(3_600)
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
    futures = [pool.submit(str(k)) for k in range(50)]
    pool.close()
    assert futures[-1].cancelled() and not (tmp_path / "49").exists()
    begun = [k for k, future in enumerate(futures) if not future.cancelled()]
    assert all((tmp_path / str(k)).exists() for k in begun)


def test_processes_are_deaf_to_interrupts() -> None:
    with (
        closing(Workers(1, _start_interrupted)) as pool,
        pytest.raises(DFlashError, match="interrupted and alive"),
    ):
        pool.submit().result(timeout=60)


def _start_interrupted():
    def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        raise DFlashError("interrupted and alive")

    return work
