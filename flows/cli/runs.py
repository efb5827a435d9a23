"""``dflash-flow runs``: what was run, what came of it, and how two runs differ."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from configs.settings import RunConfig, TrackingConfig
from dflash_core.errors import ConfigError, TrackingError
from tasks.terminal import Terminal

if TYPE_CHECKING:
    from tasks.tracking.recorded import RecordedRun

__all__ = ["add_arguments", "run"]

MOST_RUNS = 50_000
FIGURES = {
    "tau": "tau",
    "ktok_s_measured": "Ktok/s",
    "prediction_error": "predicted by",
    "loss": "loss",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("names", nargs="*", metavar="RUN", help="compare these instead of listing")
    parser.add_argument("--root", type=Path, default=RunConfig().root, metavar="DIR")
    parser.add_argument("--uri", metavar="URI", help="MLflow; MLFLOW_TRACKING_URI by default")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="most runs to list")
    parser.add_argument("--deliver", action="store_true", help="send what MLflow missed")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """List or compare runs."""
    if not 1 <= arguments.limit <= MOST_RUNS:
        raise ConfigError(
            f"--limit {arguments.limit} is out of range; MLflow lists 1 to {MOST_RUNS:,} runs"
        )
    import mlflow.exceptions

    from tasks.tracking.recorded import find_runs, recorded_runs
    from tasks.tracking.run import deliver_pending, tracking_client
    from tasks.tracking.spool import shown_uri

    client = tracking_client(TrackingConfig(uri=arguments.uri), arguments.root)
    left = deliver_pending(arguments.root, client) if arguments.deliver else {}
    try:
        # Names to compare may be older than the newest that a list would show.
        runs = recorded_runs(client, limit=1000 if arguments.names else arguments.limit)
    except (mlflow.exceptions.MlflowException, OSError):
        raise TrackingError(
            f"MLflow at {shown_uri(client)} does not answer; start it, or name another with --uri"
        ) from None
    chosen = find_runs(runs, arguments.names) if arguments.names else runs
    if arguments.json:
        values = {"runs": [item.model_dump() for item in chosen], "waiting": left}
        sys.stdout.write(json.dumps(values) + "\n")
        return 0
    console = Terminal()
    for name, count in left.items():
        state = f"{count} messages still wait" if count else "everything was delivered"
        console.print(f"{name}: {state}")
    console.print(_comparison(chosen) if arguments.names else _listing(chosen))
    return 0


def _listing(runs: "list[RecordedRun]") -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("run", "flow", "started", "status", "strategy"):
        table.add_column(heading)
    for heading in FIGURES.values():
        table.add_column(heading, justify="right")
    for item in runs:
        figures = [_figure(name, item.metrics.get(name)) for name in FIGURES]
        table.add_row(
            item.name, item.flow, item.started, item.status.lower(), item.strategy, *figures
        )
    return table


def _comparison(runs: "list[RecordedRun]") -> Table:
    from tasks.tracking.recorded import differing

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for item in runs:
        table.add_column(item.name)
    table.add_row("status", *(item.status.lower() for item in runs))
    table.add_row("strategy", *(item.strategy for item in runs))
    table.add_row("rejected", *(", ".join(item.rejected) for item in runs))
    for name, heading in FIGURES.items():
        table.add_row(heading, *(_figure(name, item.metrics.get(name)) for item in runs))
    table.add_section()
    for name, values in differing(runs).items():
        table.add_row(name, *values)
    return table


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:+.1%}" if name == "prediction_error" else f"{value:.3f}"
