"""``dflash-flow convert``: a GGUF file to a target folder."""

import argparse
import json
import sys
from pathlib import Path

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "file", metavar="FILE|PACKAGE:FILE", help="a GGUF file, or one in an installed package"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="target folder")
    parser.add_argument("--sha256", metavar="HEX", help="what the file must hash to")
    parser.add_argument("--bytes", type=int, metavar="N", help="how long the file must be")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Convert, unless it was done before."""
    from dflash_core.target.gguf import convert_gguf, find_gguf

    file = find_gguf(arguments.file)
    out = convert_gguf(file, arguments.out, sha256=arguments.sha256, num_bytes=arguments.bytes)
    sys.stdout.write((json.dumps({"target": str(out)}) if arguments.json else str(out)) + "\n")
    return 0
