"""``dflash-flow export``: a drafter in a layout that servers load."""

import argparse
import json
import sys
from pathlib import Path
from typing import get_args

import torch
from rich.table import Table

from configs.settings import load_settings
from dflash_core.artifacts import MANIFEST_NAME, check_replaceable
from dflash_core.config import changed
from dflash_core.errors import DraftError
from dflash_core.export.engines import Verdict, judge
from dflash_core.export.write import DRAFTER_KIND, Layout, drafter_config, export_drafter
from dflash_core.target.loading import Target, load_target
from dflash_core.training.drafter import load_checkpoint_drafter
from tasks.terminal import Terminal

__all__ = ["TAKES_SETTINGS", "add_arguments", "run"]

TAKES_SETTINGS = True

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="a drafter, a run, or its checkpoint"
    )
    parser.add_argument("--format", choices=get_args(Layout), default="zlab", dest="layout")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help="names the target")
    parser.add_argument("--target", type=Path, metavar="DIR", help="needed by speculators")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="bfloat16 by default")
    parser.add_argument(
        "--strict", action="store_true", help="write nothing that a server would run otherwise"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Write the export and name its files."""
    check_replaceable(arguments.out, kind=DRAFTER_KIND)
    drafter = load_checkpoint_drafter(arguments.checkpoint)
    target = _target(arguments, drafter.spec.target_layer_ids)
    dtype = DTYPES[arguments.dtype]
    config = drafter_config(drafter.spec, arguments.layout, dtype, target)
    verdicts = judge(drafter.spec, config, arguments.layout, target)
    if arguments.strict:
        _insist(verdicts)
    out = export_drafter(
        drafter,
        arguments.out,
        layout=arguments.layout,
        dtype=dtype,
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
        "engines": [vars(verdict) for verdict in verdicts],
    }
    if arguments.json:
        sys.stdout.write(json.dumps(facts) + "\n")
        return 0
    table = Table("file", "bytes", title=f"{out} ({arguments.layout})")
    table.columns[1].justify = "right"
    for name, num_bytes in facts["files"].items():
        table.add_row(name, f"{num_bytes:,}")
    Terminal().print(table)
    table = Table("engine", "serves it", "but")
    for verdict in verdicts:
        serves = "no" if verdict.refuses else "otherwise" if verdict.wrong else "as trained"
        table.add_row(verdict.engine, serves, verdict.refuses or "; ".join(verdict.wrong))
    Terminal().print(table)
    if target is None:
        Terminal().print("without --target, who knows its class is not asked")
    return 0


def _target(arguments: argparse.Namespace, layer_ids: tuple[int, ...]) -> Target | None:
    """Load embedding and head of the target that --target, --config or --target.path names."""
    settings = None
    if arguments.target is not None:
        arguments.overrides += ["--target.path", str(arguments.target)]
    if arguments.config is not None or arguments.overrides:
        settings = load_settings(arguments.config, arguments.overrides).target
    if settings is None:
        return None
    return load_target(changed(settings, {"layer_ids": layer_ids}), layers=False)


def _insist(verdicts: list[Verdict]) -> None:
    """Refuse a drafter that an engine would run otherwise, or that none would run.

    Raises:
        DraftError: There is such an engine, or no engine.
    """
    wrong = [f"{v.engine} serves {'; '.join(v.wrong)}" for v in verdicts if v.wrong]
    if wrong:
        raise DraftError(f"{', '.join(wrong)}; leave out --strict or choose another --format")
    if all(verdict.refuses for verdict in verdicts):
        raise DraftError("no engine serves this drafter; choose another --format")
