"""``dflash-flow watch RUN``: a training run, live in the terminal."""

import argparse
import json
import sys
import time
from pathlib import Path

from rich.live import Live

from dflash_core.errors import ConfigError
from dflash_core.training.telemetry.status import RunLog, find_run
from flows.cli import EXIT_FAILED, EXIT_INTERRUPTED
from tasks.terminal import Terminal

__all__ = ["add_arguments", "run"]

LONGEST_S = 3_600
EXIT_CODES = {"failed": EXIT_FAILED, "interrupted": EXIT_INTERRUPTED}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--every", type=float, default=1.0, metavar="S", help="seconds between")
    parser.add_argument("--once", action="store_true", help="show the state now and end")
    parser.add_argument("--json", action="store_true", help="print status and last step, and end")


def run(arguments: argparse.Namespace) -> int:
    """Show the run until it ends.

    Returns:
        0 finished (or shown once), 1 failed, 4 interrupted.
    """
    from flows.cli.watch_view import view

    if not 0 < arguments.every <= LONGEST_S:
        raise ConfigError(
            f"--every {arguments.every:g} is no time between looks; give seconds above 0 and up to "
            f"{LONGEST_S:,}"
        )
    log = RunLog(find_run(arguments.run))
    log.refresh()
    if arguments.json:
        status = None if log.status is None else log.status.model_dump()
        last = log.steps[-1] if log.steps else None
        sys.stdout.write(json.dumps({"status": status, "last_step": last}) + "\n")
        return 0
    console = Terminal()
    if arguments.once or not console.is_terminal:
        console.print(view(log))
        return 0
    with Live(view(log), console=console, auto_refresh=False) as live:
        while log.status is None or log.status.state == "running":
            time.sleep(arguments.every)
            log.refresh()
            live.update(view(log), refresh=True)
    return EXIT_CODES.get(log.status.state, 0)
