"""One start of torchrun as a value, and the process that it becomes."""

import os
import signal
import subprocess
import sys
from collections.abc import Collection

from dflash_core.config import FrozenModel

__all__ = ["FLOW_RUN_ID", "SHUTDOWN_TIMEOUT_S", "Launch", "end", "start", "stop"]

FLOW_RUN_ID = "PREFECT__FLOW_RUN_ID"  # Prefect's workers set it for what they start
# Prefect kills a cancelled run 30 s after SIGTERM: ranks must be done well before.
SHUTDOWN_TIMEOUT_S = 15
PR_SET_PDEATHSIG = 1
# A parent that died before the kernel was asked is known by who inherited its child.
DIE_WITH_PARENT = (
    "import ctypes,os,sys;"
    f"ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG},{int(signal.SIGTERM)},0,0,0);"
    "os.getppid()==int(sys.argv[1]) or sys.exit(1);"
    "os.execvp(sys.argv[2],sys.argv[2:])"
)


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
            *(sys.executable, "-c", DIE_WITH_PARENT, str(os.getpid())),
            *(sys.executable, "-m", "torch.distributed.run", *where),
            f"--nproc-per-node={self.num_ranks // self.nodes}",
            f"--shutdown-timeout={SHUTDOWN_TIMEOUT_S}",
            *("-m", self.module, *self.arguments),
        ]


def start(launch: Launch, *, holding: Collection[int] = ()) -> "subprocess.Popen[str]":
    """Start torchrun as a child that ends, with its ranks, when this process does.

    Args:
        launch: What to start.
        holding: Open files that it keeps open as long as it lives, such as locked ones.
    """
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
        text=True,
        bufsize=1,
        errors="replace",
        pass_fds=holding,
    )


def end(process: "subprocess.Popen[str]") -> None:
    """End torchrun, which ends its ranks; it gets its time to save first."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(SHUTDOWN_TIMEOUT_S + 5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def stop(process: "subprocess.Popen[str]") -> None:
    """End torchrun and read no more of it."""
    end(process)
    assert process.stdout is not None
    process.stdout.close()
