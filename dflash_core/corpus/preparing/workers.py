"""Processes that work off calls, one at a time each, and whose death is told and never waited for.

The executor of the standard library may close the pipe of a process that it is just starting when
another dies, or wait for ever for a dead one to read (https://github.com/python/cpython/issues/94777).
Here each process has a pipe of its own, held by nobody else, and a thread of the parent at it: a
death is the end of that pipe.
"""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from queue import SimpleQueue
from typing import Any

from dflash_core.processes import sheltered

__all__ = ["WorkerDied", "Workers"]

Start = Callable[..., Callable[..., object]]


class WorkerDied(Exception):
    """A process ended before it answered."""


class Workers:
    """A pool of processes.

    Args:
        count: Most processes; they start as calls come in.
        start: Called with the arguments once in each process, returns what does the calls.
        arguments: What to start with; small, since a process that dies early has not read them.
    """

    def __init__(self, count: int, start: Start, *arguments: Any) -> None:
        self._count = count
        self._start = start, arguments
        self._processes: list[SpawnProcess] = []
        self._free: SimpleQueue[Connection] = SimpleQueue()
        self._threads = ThreadPoolExecutor(count)

    def submit(self, *call: Any) -> Future[None]:
        """Have a process do a call.

        Returns:
            Done with it, or failed with what it raised or with `WorkerDied`.
        """
        if len(self._processes) < self._count:
            self._add_process()
        return self._threads.submit(self._do, call)

    def close(self) -> None:
        """Wait for the calls at hand and leave the others."""
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.terminate()
            process.join()

    def _add_process(self) -> None:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, *self._start), daemon=True)
        # With the first process it would be started too, and then let interrupts through again.
        resource_tracker.ensure_running()
        with sheltered():
            process.start()
        theirs.close()  # Only then does the pipe end with the process.
        self._processes.append(process)
        self._free.put(ours)

    def _do(self, call: tuple[Any, ...]) -> None:
        pipe = self._free.get()  # There is one: threads are no more than processes.
        try:
            pipe.send(call)
            error = pipe.recv()
        except (EOFError, OSError) as end:
            raise WorkerDied from end
        finally:
            self._free.put(pipe)
        if error is not None:
            raise error


def _serve(pipe: Connection, start: Start, arguments: tuple[Any, ...]) -> None:
    parent = os.getppid()

    def die_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=die_with_parent, daemon=True).start()
    work = None
    with suppress(EOFError, ConnectionError):
        while True:
            call = pipe.recv()
            try:
                work = work or start(*arguments)
                work(*call)
            except Exception as error:
                pipe.send(error)
            else:
                pipe.send(None)
