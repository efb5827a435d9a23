"""What people see while a flow runs: its log always, and bars on a terminal.

On a worker only the flow's log exists. The command line calls `use_console` once, and steps and
progress then show on standard error too.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tasks.terminal import Terminal

__all__ = ["OnProgress", "announce", "logger", "progress", "use_console", "warn"]

OnProgress = Callable[[int, int], None]
"""Called with what is done and what there is to do."""

LINE_EVERY_S = 10.0
_console: list[Terminal] = []


def use_console() -> None:
    """Show steps and progress on standard error as well."""
    if not _console:
        _console.append(Terminal(stderr=True))


def logger() -> logging.Logger | logging.LoggerAdapter[logging.Logger]:
    """Return the logger of the current task or flow run, or a plain one outside."""
    try:
        return get_run_logger()
    except MissingContextError:
        return logging.getLogger("dflash")


def announce(text: str) -> None:
    """Log one line, and show it."""
    logger().info(text)
    for console in _console:
        console.print(text, soft_wrap=True)


def warn(text: str) -> None:
    """Log one warning, and show it."""
    logger().warning(text)
    for console in _console:
        console.print(f"warning: {text}", soft_wrap=True)


@contextmanager
def progress(label: str) -> Iterator[OnProgress]:
    """Give a callback that shows progress: a bar on a terminal, else a line now and then."""
    if _console and _console[0].is_terminal:
        columns = (
            TextColumn("  {task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=_console[0], transient=True) as bars:
            bar = bars.add_task(label, total=None)
            yield lambda done, total: bars.update(bar, completed=done, total=total)
        return
    last = time.monotonic()

    def on_progress(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= LINE_EVERY_S:
            last = now
            announce(f"  {label}: {done:,} of {total:,}")

    yield on_progress
