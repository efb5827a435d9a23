"""The request to stop. No torch here: it must be heard while torch is still being imported."""

import signal
from types import FrameType

__all__ = ["StopRequest"]


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
