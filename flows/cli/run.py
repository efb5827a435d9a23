"""``dflash-flow run``: the whole chain."""

import argparse
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table as RichTable

from configs.settings import Settings, load_settings
from dflash_core.errors import DFlashError
from dflash_core.processes import sheltered
from flows.cli import EXIT_FAILED, EXIT_REJECTED
from flows.cli.interrupts import INTERRUPTS
from tasks.terminal import Terminal

if TYPE_CHECKING:
    from dflash_core.reporting import Table

__all__ = [
    "TAKES_SETTINGS",
    "add_arguments",
    "explain",
    "prefect_loading",
    "print_table",
    "run",
    "run_settings",
]

TAKES_SETTINGS = True

WIDE = 180  # columns of a pipe or a log

# Before Prefect is imported: no telemetry without asking, and our own lines instead of its log.
QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_LOGGING_LEVEL": "CRITICAL",
    # Else its own server, told to end while it writes, puts tracebacks after our last line.
    "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
    # Its own server for the run takes longer than Prefect's 20 s where other work runs beside it.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "TRANSFORMERS_VERBOSITY": "error",
    # Threads that spin while they wait starve ranks and tests beside them many times over.
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--config", type=Path, required=True, metavar="FILE.toml")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run the flow and print what came of it."""
    settings = load_settings(arguments.config, arguments.overrides)
    return run_settings(settings, as_json=arguments.json)


def run_settings(settings: Settings, *, as_json: bool = False) -> int:
    """Run the flow with settings; see `run`."""
    with prefect_loading():
        from flows.train_drafter import train_drafter

    state = train_drafter(settings, return_state=True)
    if state.name == "Rejected":
        found: Any = state.result(raise_on_failure=False)
        _show(found.summary, settings, as_json=as_json)
        return EXIT_REJECTED
    if state.is_completed():
        _show(state.result(), settings, as_json=as_json)
        return 0
    return explain(state)


@contextmanager
def prefect_loading() -> Iterator[None]:
    """Quieten what flows run on, import them in the block, and have a server for them.

    Prefect's own server for the run, which starts where none is named, is deaf to the terminal:
    it has to outlive Ctrl-C until it knows how the runs ended.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    with INTERRUPTS.idle():
        yield
        from prefect.client.orchestration import get_client

        from tasks.console import use_console

    use_console()
    with sheltered():
        get_client(sync_client=True)


def explain(state: Any) -> int:
    """Say why a flow run failed: one sentence for what was foreseen, a traceback for a bug."""
    error = state.result(raise_on_failure=False)
    if isinstance(error, DFlashError | KeyboardInterrupt):
        raise error
    if INTERRUPTS.asked:
        raise KeyboardInterrupt  # of which Prefect or another library has made this error
    if isinstance(error, BaseException):
        traceback.print_exception(error)
    sys.stderr.write(f"dflash-flow: {state.message}\n")
    return EXIT_FAILED


def print_table(table: "Table") -> Terminal:
    """Print a table of a run on standard output and return the console."""
    console = Terminal(width=None if sys.stdout.isatty() else WIDE)
    shown = RichTable(*table.headings, box=None)
    for row in table.rows:
        shown.add_row(*row)
    console.print(shown)
    return console


def _show(summary: Any, settings: Settings, *, as_json: bool) -> None:
    from dflash_core.reporting import headline, strategy_table

    if as_json:
        sys.stdout.write(summary.model_dump_json() + "\n")
        return
    console = print_table(strategy_table(summary))
    for name, value in headline(summary):
        console.print(f"{name:>12}  {value}")
    root = settings.run.root.resolve()
    console.print(f"{'report':>12}  {root / summary.name / 'report.html'}", soft_wrap=True)
