"""``dflash-flow join``: one of several machines that train together (``run.nodes``).

On Kubernetes all pods of an indexed job start this: the first runs the flow, the others follow it.
"""

import argparse
import os
import sys
from pathlib import Path

from configs.settings import RunConfig
from dflash_core.errors import ConfigError
from tasks.launching.launch import FLOW_RUN_ID

__all__ = ["add_arguments", "run"]

INDEX = "JOB_COMPLETION_INDEX"  # Kubernetes numbers the pods of an indexed job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--root", type=Path, default=RunConfig().root, metavar="DIR")
    parser.add_argument("--flow-run", metavar="ID", help=f"the flow run; {FLOW_RUN_ID} by default")
    parser.add_argument("--patience", type=float, default=3600.0, metavar="S", help="longest wait")


def run(arguments: argparse.Namespace) -> int:
    """Run the flow as the first pod; else start what the flow run starts, until it ends.

    Raises:
        ConfigError: No flow run is named, or the wait is no time.
        TrainingError: The ranks here failed, or the flow run says nothing.
    """
    if os.environ.get(INDEX) == "0":
        os.execv(sys.executable, [sys.executable, "-m", "prefect", "flow-run", "execute"])  # noqa: S606
    if not arguments.patience >= 0:
        raise ConfigError(
            f"--patience {arguments.patience:g} is no time to wait; give seconds of at least 0"
        )
    from tasks.launching.machines import follow, launches_folder

    flow_run_id = arguments.flow_run or os.environ.get(FLOW_RUN_ID)
    if not flow_run_id:
        raise ConfigError(f"no flow run to join; give --flow-run ID or set {FLOW_RUN_ID}")
    folder = launches_folder(arguments.root, flow_run_id)
    count = follow(folder, patience_s=arguments.patience, on_line=_show)
    sys.stdout.write(f"the flow run has ended; took part in {count} launches\n")
    return 0


def _show(line: str) -> None:
    sys.stderr.write(f"{line}\n")
