"""What this process starts: it is deaf to the terminal, and dies with its parent.

``python -m dflash_core.processes PARENT COMMAND...`` becomes the command, which gets SIGTERM when
the process PARENT dies.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["die_with_parent", "sheltered"]

PR_SET_PDEATHSIG = 1


@contextmanager
def sheltered() -> Iterator[None]:
    """Keep Ctrl-C and the terminal's end, which are ours to handle, from what starts meanwhile.

    A terminal signals all its foreground processes at once; those that inherit this mask are ended
    by their parent when it has no more use for them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_with_parent(number: signal.Signals) -> None:
    """Have the kernel send a signal when the thread that started this process ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


if __name__ == "__main__":
    die_with_parent(signal.SIGTERM)
    # One that died before the kernel was asked is known by who inherited its child.
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606
