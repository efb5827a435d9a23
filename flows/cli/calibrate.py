"""``dflash-flow calibrate``: what a micro-batch costs on this machine."""

import argparse
import sys
from pathlib import Path

from rich.table import Table

from configs.settings import load_settings
from dflash_core.artifacts import atomic_write, check_writable
from dflash_core.config import changed
from dflash_core.throughput import CostModel
from dflash_core.throughput.cost import ROLE_TERMS, TERMS
from flows.cli.run import explain, prefect_loading
from tasks.terminal import Terminal

__all__ = ["TAKES_SETTINGS", "add_arguments", "run"]

TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--config", type=Path, required=True, metavar="FILE.toml")
    parser.add_argument(
        "--again", action="store_true", help="measure anew even if a calibration is kept"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the cost model there")
    parser.add_argument("--json", action="store_true", help="print the cost model as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the flow and print the cost model."""
    settings = load_settings(arguments.config, arguments.overrides)
    if arguments.out is not None:
        check_writable(arguments.out)
    if arguments.again:
        run = changed(settings.run, {"calibrate_again": True})
        settings = changed(settings, {"run": run})
    with prefect_loading():
        from flows.calibrate import calibrate

    state = calibrate(settings, return_state=True)
    if not state.is_completed():
        return explain(state)
    model = state.result()
    if arguments.out is not None:
        atomic_write(arguments.out, model.model_dump_json(indent=1, exclude_defaults=True) + "\n")
    if arguments.json:
        sys.stdout.write(model.model_dump_json() + "\n")
        return 0
    _show(model)
    return 0


def _show(model: CostModel) -> None:
    console = Terminal()
    table = Table("role", "per", "microseconds", "held-out error", box=None)
    for column in table.columns[2:]:
        column.justify = "right"
    for role, fit in model.roles.items():
        shown: str = role
        error = f"{fit.held_out_error:.1%}"
        for name in ROLE_TERMS[role]:
            microseconds = getattr(fit.coefficients, name) * 1e6
            table.add_row(shown, TERMS[name], f"{microseconds:.6g}", error)
            shown = error = ""
    table.add_row("step", "optimizer step", f"{model.step_s * 1e6:.6g}", "")
    if model.reduce_s:
        table.add_row("", "sum of gradients", f"{model.reduce_s * 1e6:.6g}", "")
    if model.transfer_s_per_token:
        table.add_row("transfer", "micro-batch", f"{model.transfer_latency_s * 1e6:.6g}", "")
        table.add_row("transfer", "real token", f"{model.transfer_s_per_token * 1e6:.6g}", "")
    console.print(table)
    console.print(
        f"a rehearsal of real steps took {model.correction:.3f} of the modelled time; "
        f"micro-batches of one kind differ by {model.jitter:.1%} between ranks"
    )
    for terms in model.inseparable:
        console.print(f"the measured shapes cannot tell apart {terms}")
