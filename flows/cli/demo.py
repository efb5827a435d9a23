"""``dflash-flow demo``: the whole chain on the built-in example."""

import argparse
from pathlib import Path

import configs
from configs.settings import load_settings
from flows.cli.run import run_settings

__all__ = ["TAKES_SETTINGS", "add_arguments", "run"]

TAKES_SETTINGS = True

# A quarter of an hour: more of the library, more often.
LONG = ("--corpus.max_samples", "2600", "--training.epochs", "5")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--long", action="store_true", help="a quarter of an hour instead of five")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run ``configs/demo.toml``, with more data and epochs when it may take longer."""
    file = Path(configs.__file__).parent / "demo.toml"
    longer = LONG if arguments.long else ()
    settings = load_settings(file, [*longer, *arguments.overrides])
    return run_settings(settings, as_json=arguments.json)
