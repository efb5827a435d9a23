"""One start of torchrun as a value, and the process that it becomes."""

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator

from dflash_core.config import FrozenModel
from dflash_core.processes import sheltered

__all__ = [
    "FLOW_RUN_ID",
    "SHUTDOWN_TIMEOUT_S",
    "Launch",
    "end",
    "hurry",
    "printed",
    "start",
    "stop",
]

FLOW_RUN_ID = "PREFECT__FLOW_RUN_ID"  # Prefect's workers set it for what they start
# Prefect kills a cancelled run 30 s after SIGTERM: ranks must be done well before.
SHUTDOWN_TIMEOUT_S = 15
POLL_S = 0.5

hurry = threading.Event()
"""Set when nobody waits any more until ranks have saved."""


class Launch(FrozenModel):
    """What to start, the same on every machine."""

    module: str
    """Module to run in each rank."""
    arguments: tuple[str, ...]
    """Its arguments; they come after the module's name, where torchrun reads none."""
    num_ranks: int
    """Processes on all machines together."""
    threads_per_rank: int = 1
    """CPU threads of each process."""
    nodes: int = 1
    """Machines."""
    rendezvous: str = ""
    """HOST:PORT where several machines meet."""
    meeting_limit_s: int = 600
    """Longest wait there."""
    key: str = ""
    """Names this launch among others at the same place."""

    @property
    def command(self) -> list[str]:
        """The argument vector; values of settings are only ever parts of one word of it."""
        where = ["--standalone"]
        if self.nodes > 1:
            where = [
                f"--nnodes={self.nodes}",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={self.rendezvous}",
                f"--rdzv-conf=join_timeout={self.meeting_limit_s}",
                f"--rdzv-id={self.key}",
            ]
        return [
            *(sys.executable, "-m", "dflash_core.processes", str(os.getpid())),
            *(sys.executable, "-m", "torch.distributed.run", *where),
            f"--nproc-per-node={self.num_ranks // self.nodes}",
            f"--shutdown-timeout={SHUTDOWN_TIMEOUT_S}",
            *("-m", self.module, *self.arguments),
        ]


def start(launch: Launch, *, holding: Collection[int] = ()) -> "subprocess.Popen[bytes]":
    """Start torchrun as a child that ends, with its ranks, when this process does.

    A terminal's Ctrl-C does not reach it: torchrun would pass it on, and ranks save on SIGTERM.

    Args:
        launch: What to start.
        holding: Open files that it keeps open as long as it lives, such as locked ones.
    """
    with sheltered():
        return subprocess.Popen(
            launch.command,
            env={
                **os.environ,
                "OMP_NUM_THREADS": str(launch.threads_per_rank),
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "PYTHONUNBUFFERED": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            pass_fds=holding,
        )


def printed(process: "subprocess.Popen[bytes]") -> Iterator[str]:
    """Give the lines that a process prints as they come, without empty ones, until its end.

    No wait is long: a read would go on after Ctrl-C once Polars has told the kernel to restart it.
    """
    assert process.stdout is not None
    waiting, left = select.poll(), b""
    waiting.register(process.stdout)
    while True:
        if not waiting.poll(POLL_S * 1000):
            continue
        data = process.stdout.read(1 << 16)
        *lines, left = (left + data).replace(b"\r", b"\n").split(b"\n")
        if not data:
            lines.append(left)
        yield from (text for line in lines if (text := line.decode(errors="replace").rstrip()))
        if not data:
            return


def end(process: "subprocess.Popen[bytes]") -> None:
    """End torchrun, which ends its ranks; it gets its time to save first, unless in a hurry."""
    process.terminate()
    deadline = time.monotonic() + SHUTDOWN_TIMEOUT_S + 5
    try:
        while process.poll() is None and time.monotonic() < deadline and not hurry.wait(0.1):
            pass
    finally:
        process.kill()
        process.wait()


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End torchrun and read no more of it."""
    end(process)
    assert process.stdout is not None
    process.stdout.close()
