"""Start torchrun as a child, follow it, and leave no rank behind whatever happens.

torchrun gives every rank its own session, so only torchrun can stop its ranks, and only the
kernel can stop torchrun when this process is killed: the launcher asks for SIGTERM on its
parent's death, and each rank for SIGKILL. Call from the flow's own thread, never through
``.submit()``: the kernel counts the death of the thread that forked.
"""

import contextvars
import fcntl
import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from configs.settings import RunConfig
from dflash_core.errors import InputError, Interrupted, TimeLimitError, TrainingError
from dflash_core.training.telemetry.status import METRICS_NAME, STATUS_NAME, RunStatus, read_status
from tasks.launching.launch import SHUTDOWN_TIMEOUT_S, Launch, printed, start, stop
from tasks.launching.machines import Machines
from tasks.launching.watching import Watch

__all__ = ["MetricsTail", "run_torchrun"]

OnLine = Callable[[str], None]
OnMetrics = Callable[[list[dict[str, Any]]], None]

DEFAULTS = RunConfig()
POLL_S = 0.5
LEFTOVER_LIMIT_S = 4 * SHUTDOWN_TIMEOUT_S
LAST_LINES = 200
FULL = re.compile(r"\[Errno (28|122)\]|\(os error (28|122)\)")
INPUT_ERRORS = {error.__name__: error for error in InputError.__subclasses__()}
FOLLOW_UPS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "in vain")
KILLED = re.compile(r"\bexitcode\s*:\s*-9\b")
ERROR_LINE = re.compile(r"^(?:\[rank\d+\]:\s*)?(?:[\w.]*\.)?\w*(?:Error|Exception|Interrupted)\b.*")


def run_torchrun(
    module: str,
    arguments: Sequence[str],
    *,
    num_ranks: int,
    run_dir: Path,
    threads_per_rank: int = 1,
    what: str = "training",
    config: RunConfig = DEFAULTS,
    machines: Machines | None = None,
    on_line: OnLine | None = None,
    on_metrics: OnMetrics | None = None,
) -> None:
    """Run a module under torchrun until it ends.

    Args:
        module: Module to run in each rank.
        arguments: Its arguments; they come after the module's name, where torchrun reads none.
        num_ranks: Processes, on all machines together.
        run_dir: Folder with ``status.json`` and ``metrics.jsonl``.
        threads_per_rank: CPU threads of each process.
        what: What is done, for the error message.
        config: Says how long it may take.
        machines: Others that take part; this one alone when not given.
        on_line: Called with each line that ranks print.
        on_metrics: Called with new lines of ``metrics.jsonl``, several at a time.

    Raises:
        KeyboardInterrupt: Ctrl-C came and the ranks were stopped; it says how far they were.
        Interrupted: The ranks saved and stopped, on request or because a time limit was reached.
        TimeLimitError: A time limit was reached, and the ranks could not save, or other machines
            did not come.
        InputError: What a rank was given cannot be used; the error is the rank's own.
        TrainingError: A rank failed; its own last error comes first.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    launch = Launch(
        module=module,
        arguments=tuple(arguments),
        num_ranks=num_ranks,
        threads_per_rank=threads_per_rank,
    )
    with _free_of_ranks(run_dir) as lock:
        (run_dir / STATUS_NAME).unlink(missing_ok=True)
        if machines is not None:
            launch = machines.announce(launch)
        tail = MetricsTail(run_dir / METRICS_NAME, on_metrics)
        process = start(launch, holding=(lock,))
    signs = [run_dir / name for name in (METRICS_NAME, STATUS_NAME)]
    watch = Watch(process, signs, config)
    last: deque[str] = deque(maxlen=LAST_LINES)
    try:
        tail.start()
        for line in printed(process):
            watch.sign()
            last.append(line)
            if on_line is not None:
                on_line(line)
        process.wait()
    except KeyboardInterrupt:
        stop(process)
        raise KeyboardInterrupt(_stopped(read_status(run_dir))) from None
    finally:
        watch.stop()
        stop(process)
        if machines is not None:
            machines.over()
        tail.stop()
    status = read_status(run_dir)
    if watch.reached and process.returncode:
        raise _too_late(watch.reached, status)
    if any("RendezvousTimeoutError" in line for line in last):
        raise TimeLimitError(
            f"{launch.nodes} machines (run.nodes) did not meet at {launch.rendezvous} within "
            f"{launch.meeting_limit_s} s (run.meeting_limit_s); start dflash-flow join on the "
            "others, or raise the limit"
        )
    if process.returncode and any(FULL.search(line) for line in last):
        raise TrainingError(
            f"the disk of {run_dir} or of its cache is full; make room, and the same command "
            "continues"
        )
    _judge(process.returncode, status, last, what)


@contextmanager
def _free_of_ranks(run_dir: Path) -> Iterator[int]:
    """Wait for ranks whose parent was killed, for they still save; give the lock of their folder.

    Raises:
        TrainingError: They do not end.
    """
    with (run_dir / ".ranks.lock").open("w") as lock:
        deadline = time.monotonic() + LEFTOVER_LIMIT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TrainingError(
                        f"ranks of an earlier launch work in {run_dir} and did not end within "
                        f"{LEFTOVER_LIMIT_S} s; end them, and the same command continues"
                    ) from None
            time.sleep(POLL_S)
        yield lock.fileno()


def _stopped(status: RunStatus | None) -> str:
    if status is None or status.state != "interrupted":
        return "stopped before the ranks could save; the same command continues from the last save"
    return (
        f"stopped after step {status.step} of {status.num_steps}; the same command continues from "
        "there"
    )


def _too_late(reached: str, status: RunStatus | None) -> Interrupted | TimeLimitError:
    """Say which limit was reached and whether the ranks could save."""
    if status is not None and status.state == "interrupted":
        return Interrupted(
            f"{reached} after step {status.step} of {status.num_steps}; the same command continues "
            "from there"
        )
    where = f" after step {status.step}" if status is not None and status.step else ""
    return TimeLimitError(
        f"{reached}{where}; see why in the lines above, or raise the limit, and the same command "
        "continues from the last checkpoint"
    )


def _judge(code: int, status: RunStatus | None, last: Sequence[str], what: str) -> None:
    """Turn torchrun's exit, which is 1 for everything, into what the ranks said."""
    if status is not None and status.state == "interrupted":
        raise Interrupted(
            f"stopped on request after step {status.step} of {status.num_steps}; the same command "
            "continues from there"
        )
    if code == 0 and (status is None or status.state == "finished"):
        return
    failed = status if status is not None and status.state == "failed" else RunStatus(state="")
    if failed.kind in INPUT_ERRORS:
        raise INPUT_ERRORS[failed.kind](failed.reason)
    where = f" after step {status.step}" if status is not None and status.step else ""
    raise TrainingError(f"{what} failed{where}: {_root_cause(failed.reason, last, code)}")


def _root_cause(reason: str, last: Sequence[str], code: int) -> str:
    """Return why it failed; that a rank waited for another in vain only follows from that.

    Args:
        reason: The first that a rank wrote down; empty when none could.
        last: The last lines of all ranks and of torchrun.
        code: torchrun's exit code.
    """
    lines = [line.strip() for line in last]
    errors = [line for line in lines if ERROR_LINE.match(line) and "ChildFailedError" not in line]
    told = [text for text in (reason, *errors) if text]
    causes = [text for text in told if not any(word in text for word in FOLLOW_UPS)]
    killed = [
        f"a rank was killed ({line}), as the kernel does when memory runs out; lower "
        "batching.token_budget, or training.topology.num_ranks on this machine"
        for line in lines
        if KILLED.search(line)
    ]
    exits = [line for line in lines if "exitcode" in line]
    return next(chain(causes, killed, told, exits), f"torchrun ended with exit code {code}")


class MetricsTail:
    """Hands over complete new lines of a growing file from a thread of its own.

    What an earlier attempt left is none of them: rank 0 puts a new file in its place, which begins
    with the steps that the checkpoint has.

    Args:
        file: The file, as it is before the ranks start.
        on_metrics: Called with new lines.
    """

    def __init__(self, file: Path, on_metrics: OnMetrics | None) -> None:
        self._file = file
        self._on_metrics = on_metrics
        found = file.stat() if file.is_file() else None
        self._inode, self._offset = (found.st_ino, found.st_size) if found else (0, 0)
        self._ended = threading.Event()
        # With the caller's context, so that log lines find their flow run.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), daemon=True)

    def start(self) -> None:
        """Begin to follow the file."""
        if self._on_metrics is not None:
            self._thread.start()

    def stop(self) -> None:
        """Hand over what is left and end."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(POLL_S):
            self.read()
        self.read()

    def read(self) -> None:
        """Hand over what is new."""
        assert self._on_metrics is not None
        if not self._file.is_file():
            return
        with self._file.open("rb") as stream:
            found = os.fstat(stream.fileno())
            if found.st_ino != self._inode or found.st_size < self._offset:
                self._inode, self._offset = found.st_ino, 0
            stream.seek(self._offset)
            data = stream.read()
        end = data.rfind(b"\n") + 1
        self._offset += end
        lines = [json.loads(line) for line in data[:end].splitlines()]
        if lines:
            self._on_metrics(lines)
