"""``dflash-flow export``: a drafter in a layout that servers load."""

import argparse
import json
import sys
from pathlib import Path
from typing import get_args

import torch
from rich.table import Table

from dflash_core.artifacts import MANIFEST_NAME, check_replaceable
from dflash_core.export import DRAFTER_KIND, Layout, export_drafter, load_checkpoint_drafter
from dflash_core.target.config import TargetConfig
from dflash_core.target.loading import load_target
from tasks.terminal import Terminal

__all__ = ["add_arguments", "run"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="a drafter, a run, or its checkpoint"
    )
    parser.add_argument("--format", choices=get_args(Layout), default="zlab", dest="layout")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--target", type=Path, metavar="DIR", help="needed by speculators")
    parser.add_argument("--dtype", choices=DTYPES, help="the checkpoint's when not given")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Write the export and name its files."""
    check_replaceable(arguments.out, kind=DRAFTER_KIND)
    drafter = load_checkpoint_drafter(arguments.checkpoint)
    target = None
    if arguments.target is not None:
        layers = drafter.spec.target_layer_ids
        target = load_target(TargetConfig(path=arguments.target, layer_ids=layers))
    out = export_drafter(
        drafter,
        arguments.out,
        layout=arguments.layout,
        dtype=DTYPES.get(arguments.dtype),
        target=target,
        manifest={"exported_from": str(arguments.checkpoint)},
    )
    manifest = json.loads((out / MANIFEST_NAME).read_bytes())
    facts = {
        "out": str(out),
        "layout": arguments.layout,
        "num_parameters": sum(p.numel() for p in drafter.parameters()),
        "content_hash": manifest["content_hash"],
        "files": {name: entry["num_bytes"] for name, entry in manifest["files"].items()},
    }
    if arguments.json:
        sys.stdout.write(json.dumps(facts) + "\n")
        return 0
    table = Table("file", "bytes", title=f"{out} ({arguments.layout})")
    table.columns[1].justify = "right"
    for name, num_bytes in facts["files"].items():
        table.add_row(name, f"{num_bytes:,}")
    Terminal().print(table)
    return 0
