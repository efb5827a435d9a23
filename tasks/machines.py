"""Several machines: the one that runs the flow says what it starts, and the others start it too.

It says so in a folder that all of them share, and they meet at torchrun's own rendezvous.
"""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from configs.settings import RunConfig
from dflash_core.artifacts import atomic_write
from dflash_core.errors import ConfigError, TrainingError
from tasks.launch import Launch, start, stop

__all__ = ["Machines", "follow", "launches_folder"]

END = "end"
POLL_S = 0.5
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
    def of(cls, config: RunConfig, flow_run_id: str) -> "Machines | None":
        """Return the machines of a flow run, or None when it is alone on its own."""
        if config.nodes == 1:
            return None
        place = config.rendezvous or f"{socket.getfqdn()}:{PORT}"
        folder = launches_folder(config.root, flow_run_id)
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
        number = len(list(self.folder.glob("*.json")))
        meeting = {
            "nodes": self.nodes,
            "rendezvous": self.rendezvous,
            "meeting_limit_s": self.meeting_limit_s,
            "key": f"{self.folder.name}-{number}",
        }
        shared = launch.model_copy(update=meeting)
        atomic_write(self.folder / f"{number}.json", shared.model_dump_json())
        return shared

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
    number = 0
    while (launch := _next(folder, number, patience_s)) is not None:
        process = start(launch)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                on_line(line.rstrip())
            process.wait()
        finally:
            stop(process)
        if process.returncode:
            raise TrainingError(
                f"the ranks of launch {number} on this machine ended with exit code "
                f"{process.returncode}; their lines above say why"
            )
        number += 1
    return number


def _next(folder: Path, number: int, patience_s: float) -> Launch | None:
    deadline = time.monotonic() + patience_s
    file = folder / f"{number}.json"
    while not file.is_file():
        if (folder / END).is_file():
            return None
        if time.monotonic() > deadline:
            raise TrainingError(
                f"nothing was announced in {folder} for {patience_s:g} s (--patience); see whether "
                "the flow runs, and whether this machine shares its run.root"
            )
        time.sleep(POLL_S)
    return Launch.model_validate_json(file.read_bytes())
