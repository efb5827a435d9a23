"""``dflash-flow report``: write the page of a finished run again."""

import argparse
import sys
from pathlib import Path

from pydantic import ValidationError

from dflash_core.artifacts import atomic_write
from dflash_core.errors import ArtifactError
from dflash_core.reporting import RunSummary, headline, render_page

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a finished run")
    parser.add_argument("--out", type=Path, metavar="FILE", help="RUN/report.html by default")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Render the page from the run's summary."""
    file = arguments.run / "summary.json"
    if not file.is_file():
        raise ArtifactError(
            f"{arguments.run} holds no summary.json: no run has finished there; give a folder "
            "under run.root"
        )
    try:
        summary = RunSummary.model_validate_json(file.read_bytes())
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]["msg"]
        raise ArtifactError(f"{file} is damaged or of another version: {problem}") from None
    page = atomic_write(arguments.out or arguments.run / "report.html", render_page(summary))
    if arguments.json:
        sys.stdout.write(summary.model_dump_json() + "\n")
        return 0
    for name, value in headline(summary):
        sys.stdout.write(f"{name:>12}  {value}\n")
    sys.stdout.write(f"{'report':>12}  {page.resolve()}\n")
    return 0
