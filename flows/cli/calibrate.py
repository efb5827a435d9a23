"""``dflash-flow calibrate``: what a micro-batch costs on this machine."""

import argparse
import sys
from pathlib import Path

from configs.settings import load_settings
from flows.cli.run import explain, prepare_console

__all__ = ["TAKES_SETTINGS", "add_arguments", "run"]

TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--config", type=Path, required=True, metavar="FILE.toml")
    parser.add_argument("--json", action="store_true", help="print the cost model as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the flow and print the cost model."""
    settings = load_settings(arguments.config, arguments.overrides)
    prepare_console()
    from flows.calibrate import calibrate

    state = calibrate(settings, return_state=True)
    if not state.is_completed():
        return explain(state)
    model = state.result()
    if arguments.json:
        sys.stdout.write(model.model_dump_json() + "\n")
        return 0
    units = {"constant_s": "us", "slot_s": "us/slot", "anchor_token_s": "us/anchor token"}
    for role in ("target", "draft"):
        terms = getattr(model, role).model_dump()
        for name, value in terms.items():
            unit = units.get(name, "us/slot/token")
            sys.stdout.write(f"{role:>7}  {name:16} {value * 1e6:12.6g} {unit}\n")
    sys.stdout.write(f"{'step':>7}  {'step_s':16} {model.step_s * 1e6:12.6g} us\n")
    sys.stdout.write(f"held-out error {model.relative_error:.1%}\n")
    return 0
