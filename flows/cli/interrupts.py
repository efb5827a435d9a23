"""Ctrl-C, SIGTERM and a closed terminal are answered at once, whatever the program is doing."""

import atexit
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from tasks.launching.launch import hurry

__all__ = ["INTERRUPTS", "MAKING_A_TASK_RUN", "Interrupts"]

EXIT_INTERRUPTED = 4
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
KNOCK = signal.SIGURG  # nobody else uses it, and who does not listen for it ignores it
KNOCK_EVERY_S = 0.05
SAME_S = 0.5  # wrappers pass on a Ctrl-C that the terminal has sent us too
HURRY_S = 5.0
IMPORTS = "<frozen importlib._bootstrap>"
MAKING_A_TASK_RUN = "_create_task_run_locally"  # without which Prefect cannot call a task crashed


class Interrupts:
    """Turns the first signal into one KeyboardInterrupt, and the second Ctrl-C into a quick end.

    The main thread may be inside native code, or wait in a system call that the handler of another
    library, such as Polars' for SIGINT, has told the kernel to restart. So a thread reads what
    Python's own handler writes down at once, answers, and knocks at the main thread with a signal
    that restarts nothing until that one has heard.

    Attributes:
        asked: Whether a signal came.
    """

    def __init__(self) -> None:
        self.asked = False
        self._idle = True
        self._heard = self._due = False
        self._code: int | None = None
        self._wake = -1
        self._answering = threading.RLock()  # a second signal may come while the first is answered

    def listen(self) -> None:
        """Begin; for the main thread of a program, and for as long as it lives."""
        atexit.register(self._exit)  # before all others do, so that it runs after them
        ours, theirs = os.pipe()
        os.set_blocking(theirs, False)
        signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
        for number in STOPS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup and background jobs have it
                signal.signal(number, self._interrupt)
        signal.signal(KNOCK, self._raise_when_due)
        sys.unraisablehook = self._raise_again
        self._wake = theirs
        threading.Thread(target=self._watch, args=(ours,), name="interrupts", daemon=True).start()

    def begin(self) -> None:
        """From now on there is something to save or to end."""
        self._idle = False

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Say that until the end of the block there is nothing to save or to end."""
        self._idle = True
        yield
        self._idle = False

    def end(self, code: int) -> None:
        """Raise no more: the command has ended, and the program is about to, with this code."""
        self._heard, self._code = True, code

    def _exit(self) -> None:
        """Leave out how the interpreter frees each object of large libraries, which takes seconds.

        All that waits for the end of a program has run; one that ends otherwise goes its usual way.
        """
        if self._code is None:
            return
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # whose reader has gone
                stream.flush()
        os._exit(self._code)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._due = True
        self._raise_when_due(number, frame)

    def _raise_when_due(self, number: int, frame: FrameType | None) -> None:
        if self._due and not self._heard and not _is_half_done(frame):
            self._answer()
            self._heard = True
            raise KeyboardInterrupt

    def _answer(self) -> None:
        """Say once that the signal was seen, before anybody says what came of it."""
        with self._answering:
            if self.asked:
                return
            self.asked = True
            if self._idle:
                _leave("interrupted")
            _say("stopping, and saving what can be saved; Ctrl-C again ends at once")

    def _raise_again(self, lost: "sys.UnraisableHookArgs") -> None:
        """Knock once more after an interrupt that no one could catch.

        It came while native code, such as numba's compiler, was calling back, or while an object
        was being freed: Python drops what is raised there.
        """
        if self._code is None and issubclass(lost.exc_type, KeyboardInterrupt):
            self._heard = False
            os.write(self._wake, bytes([KNOCK]))  # the watching thread looks at it again
        else:
            sys.__unraisablehook__(lost)

    def _watch(self, signals: int) -> None:
        first_s: float | None = None
        while True:
            knocking = self.asked and not self._heard
            if not select.select([signals], [], [], KNOCK_EVERY_S if knocking else None)[0]:
                signal.pthread_kill(threading.main_thread().ident or 0, KNOCK)
                continue
            numbers = [number for number in os.read(signals, 1) if number in STOPS]
            if not numbers:
                continue
            if first_s is None:
                first_s = time.monotonic()
                self._answer()
            elif signal.SIGINT in numbers and time.monotonic() - first_s > SAME_S:
                _end_at_once()


def _end_at_once() -> NoReturn:
    """Let nobody save any more; who has not ended by then is ended."""
    hurry.set()
    time.sleep(HURRY_S)
    import psutil

    for process in psutil.Process().children(recursive=True):
        process.kill()
    _leave("ended before everything was saved")


def _is_half_done(frame: FrameType | None) -> bool:
    """Whether something short is on the way, of whose interruption libraries make another error."""
    while frame is not None:
        if frame.f_code.co_filename == IMPORTS or frame.f_code.co_name == MAKING_A_TASK_RUN:
            return True
        frame = frame.f_back
    return False


def _say(sentence: str) -> None:
    os.write(2, f"dflash-flow: {sentence}\n".encode())


def _leave(sentence: str) -> NoReturn:
    _say(sentence)
    os._exit(EXIT_INTERRUPTED)


INTERRUPTS = Interrupts()
