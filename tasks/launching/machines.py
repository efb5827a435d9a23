"""Several machines: the one that runs the flow says what it starts, and the others start it too.

It says so in a folder that all of them share, and they meet at torchrun's own rendezvous. There is
one launch at a time; one that is over is no longer announced, so whoever comes late or again, as
after a retry of the flow run, takes part in the next.
"""

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prefect.runtime import flow_run

from configs.settings import RunConfig
from dflash_core.artifacts import atomic_write
from dflash_core.config import changed
from dflash_core.errors import ConfigError, TrainingError
from tasks.launching.launch import (
    FLOW_RUN_ID,
    SHUTDOWN_TIMEOUT_S,
    Launch,
    end,
    printed,
    start,
    stop,
)

__all__ = ["Machines", "follow", "launches_folder"]

LAUNCH = "launch.json"
END = "end"
POLL_S = 0.5
GRACE_S = SHUTDOWN_TIMEOUT_S + 5.0  # ranks that took part to the end are gone by then
RETRY_S = 600.0  # an end that was there on arrival may be an earlier attempt's
PORT = 29400


@dataclass(frozen=True)
class Machines:
    """The machines of one flow run.

    Attributes:
        nodes: How many there are.
        rendezvous: HOST:PORT of the one that runs the flow.
        folder: Where launches are announced.
        meeting_limit_s: Longest wait for each other.
    """

    nodes: int
    rendezvous: str
    folder: Path
    meeting_limit_s: int = 600

    @classmethod
    def of(cls, config: RunConfig) -> "Machines | None":
        """Return the machines of this flow run, or None when it is alone on its own.

        The others know the flow run that was started, which may have called this one.
        """
        if config.nodes == 1:
            return None
        place = config.rendezvous or f"{socket.getfqdn()}:{PORT}"
        started = os.environ.get(FLOW_RUN_ID) or str(flow_run.root_flow_run_id)
        folder = launches_folder(config.root, started)
        return cls(config.nodes, place, folder, config.meeting_limit_s)

    def announce(self, launch: Launch) -> Launch:
        """Let the others start the same, and return it with the place to meet.

        Raises:
            ConfigError: The ranks cannot be shared out evenly.
        """
        if launch.num_ranks % self.nodes:
            raise ConfigError(
                f"{launch.num_ranks} ranks (training.topology.num_ranks) are no multiple of "
                f"{self.nodes} machines (run.nodes); change one of them"
            )
        meeting = {
            "nodes": self.nodes,
            "rendezvous": self.rendezvous,
            "meeting_limit_s": self.meeting_limit_s,
            "key": f"{self.folder.name}-{uuid.uuid4().hex[:8]}",
        }
        shared = changed(launch, meeting)
        atomic_write(self.folder / LAUNCH, shared.model_dump_json())
        return shared

    def over(self) -> None:
        """Let nobody start what has ended."""
        (self.folder / LAUNCH).unlink(missing_ok=True)

    def begin(self) -> None:
        """Forget what an earlier attempt of the flow run announced."""
        self.over()
        (self.folder / END).unlink(missing_ok=True)

    def dismiss(self) -> None:
        """Let the others go home."""
        atomic_write(self.folder / END, "")


def launches_folder(root: Path, flow_run_id: str) -> Path:
    """Return where a flow run announces what it starts."""
    return root.resolve() / "launches" / flow_run_id


def follow(folder: Path, *, patience_s: float, on_line: Callable[[str], None]) -> int:
    """Take part in what a flow run on another machine starts, until it ends.

    Args:
        folder: Where it announces.
        patience_s: Longest wait for the next announcement.
        on_line: Called with each line that the ranks here print.

    Returns:
        Launches taken part in.

    Raises:
        TrainingError: The ranks here failed, or nothing was announced for too long.
    """
    key, count, earlier_end = "", 0, _end_of(folder)
    while (launch := _next(folder, key, patience_s, earlier_end)) is not None:
        key = launch.key
        count += _take_part(folder, launch, on_line)
    return count


def _take_part(folder: Path, launch: Launch, on_line: Callable[[str], None]) -> bool:
    """Start a launch and wait for its end; return whether it came to one."""
    process = start(launch)
    ended, left = threading.Event(), threading.Event()

    def leave_when_over() -> None:
        while not ended.wait(POLL_S):
            announced = _announced(folder)
            if announced is None or announced.key != launch.key:
                if not ended.wait(GRACE_S):
                    left.set()
                    end(process)
                return

    watch = threading.Thread(target=leave_when_over, daemon=True)
    try:
        watch.start()
        for line in printed(process):
            on_line(line)
        process.wait()
    finally:
        ended.set()
        watch.join()
        stop(process)
    if process.returncode and not left.is_set():
        raise TrainingError(
            f"the ranks of launch {launch.key} on this machine ended with exit code "
            f"{process.returncode}; their lines above say why"
        )
    return not left.is_set()


def _next(folder: Path, key: str, patience_s: float, earlier_end: int | None) -> Launch | None:
    """Return what is announced after a launch, or None when the flow run has ended."""
    begin = time.monotonic()
    while (launch := _announced(folder)) is None or launch.key == key:
        waited_s = time.monotonic() - begin
        found = _end_of(folder)
        if found is not None and (found != earlier_end or waited_s > min(RETRY_S, patience_s)):
            return None
        if waited_s > patience_s:
            raise TrainingError(
                f"nothing was announced in {folder} for {patience_s:g} s (--patience); see whether "
                "the flow runs, and whether this machine shares its run.root"
            )
        time.sleep(POLL_S)
    return launch


def _announced(folder: Path) -> Launch | None:
    try:
        return Launch.model_validate_json((folder / LAUNCH).read_bytes())
    except FileNotFoundError:
        return None


def _end_of(folder: Path) -> int | None:
    """Return when the flow run ended, as its folder says; None while it runs."""
    try:
        return (folder / END).stat().st_mtime_ns
    except FileNotFoundError:
        return None
