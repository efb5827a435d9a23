"""The request to stop, and the launcher's end. No torch here: both come while it is imported."""

import os
import signal
from pathlib import Path
from types import FrameType

from dflash_core.processes import die_with_parent

__all__ = ["StopRequest", "die_with_launcher"]


def die_with_launcher() -> None:
    """Have the kernel end this rank when torchrun is killed.

    torchrun gives ranks a session of their own, so nothing else does; a launcher that was killed
    before this call is found by who inherited the rank.
    """
    die_with_parent(signal.SIGKILL)
    if "TORCHELASTIC_RUN_ID" in os.environ and _is_orphan():
        os._exit(1)


def _is_orphan() -> bool:
    """Whether process 1 inherited this rank; in a container it may be torchrun itself."""
    return os.getppid() == 1 and b"torch" not in Path("/proc/1/cmdline").read_bytes()


class StopRequest:
    """Remembers that SIGTERM came; the ranks agree later on the step at which they heed it.

    Attributes:
        asked: Whether it came.
    """

    def __init__(self) -> None:
        self.asked = False

    def listen(self) -> "StopRequest":
        """Catch SIGTERM from now on."""
        signal.signal(signal.SIGTERM, self._ask)
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
