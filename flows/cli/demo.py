"""``dflash-flow demo``: the whole chain on the built-in example."""

import argparse
from pathlib import Path

import configs
from configs.settings import load_settings
from flows.cli.run import run_settings

__all__ = ["TAKES_SETTINGS", "add_arguments", "run"]

TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--long", action="store_true", help="a quarter of an hour instead of five")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run ``configs/demo.toml`` or ``configs/demo-long.toml``."""
    name = "demo-long.toml" if arguments.long else "demo.toml"
    file = Path(configs.__file__).parent / name
    settings = load_settings(file, arguments.overrides)
    return run_settings(settings, as_json=arguments.json)
