"""An eye on a child process: it is ended when it takes too long or gives no sign of life."""

import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from configs.settings import RunConfig
from tasks.launching.launch import end

__all__ = ["Watch"]

POLL_S = 0.5


class Watch:
    """Ends a process that reaches a limit; it gets its time to save first.

    Args:
        process: What is watched.
        written: Files whose being written is a sign of life too.
        config: The limits.
    """

    def __init__(
        self, process: "subprocess.Popen[bytes]", written: Sequence[Path], config: RunConfig
    ) -> None:
        self.reached = ""
        """Which limit was reached, in words; empty while none was."""
        self._process = process
        self._written = written
        self._config = config
        self._started = self._last_sign = time.monotonic()
        self._seen = [_state(file) for file in written]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def sign(self) -> None:
        """Take note that the process has just printed something."""
        self._last_sign = time.monotonic()

    def stop(self) -> None:
        """Look away."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(POLL_S):
            self.look()
            if self.reached:
                end(self._process)
                return

    def look(self) -> None:
        """Take note of what was written since the last look, and of a limit that is reached."""
        if (seen := [_state(file) for file in self._written]) != self._seen:
            self._seen = seen
            self.sign()
        self.reached = self._judge()

    def _judge(self) -> str:
        limit, silence = self._config.torchrun_limit_s, self._config.silence_limit_s
        now = time.monotonic()
        if limit is not None and now - self._started > limit:
            return f"torchrun ran longer than {limit:g} s (run.torchrun_limit_s) and was ended"
        if now - self._last_sign > silence:
            return (
                f"no rank printed anything or finished a step for {silence:g} s "
                "(run.silence_limit_s), and torchrun was ended"
            )
        return ""


def _state(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns
