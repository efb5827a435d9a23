"""``dflash-flow evaluate``: what a drafter is worth on real prompts."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from configs.settings import Settings, load_settings
from dflash_core.artifacts import atomic_write, check_writable
from dflash_core.config import changed
from dflash_core.decoding.acceptance import evaluate_drafter
from dflash_core.decoding.prompts import read_prompts
from dflash_core.decoding.report import AcceptanceReport
from dflash_core.errors import ConfigError, DFlashError
from dflash_core.reporting import acceptance_table, speed_table
from dflash_core.target.loading import load_target
from dflash_core.training.drafter import load_checkpoint_drafter
from dflash_core.training.ranks.groups import device_of
from flows.cli.run import print_table
from tasks.terminal import Terminal

__all__ = ["TAKES_SETTINGS", "add_arguments", "run"]

TAKES_SETTINGS = True

# Short words for the settings that this command is mostly called with.
ALIASES = {
    "--target": "--target.path",
    "--dtype": "--target.dtype",
    "--device": "--training.device",
    "--max-prompts": "--evaluation.max_prompts",
    "--max-new-tokens": "--evaluation.max_new_tokens",
    "--batch-size": "--evaluation.batch_sizes",
    "--batch-sizes": "--evaluation.batch_sizes",
    "--temperature": "--evaluation.sampling.temperature",
    "--top-p": "--evaluation.sampling.top_p",
    "--top-k": "--evaluation.sampling.top_k",
    "--seed": "--evaluation.seed",
    "--served-as": "--evaluation.served_as",
    "--no-plain": "--no-evaluation.compare_plain",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--drafter", type=Path, required=True, metavar="DIR", help="z-lab layout")
    parser.add_argument(
        "--prompts", type=Path, required=True, metavar="FILE", help="chats, or a token store"
    )
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help="settings")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the report there")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    width = max(map(len, ALIASES))
    short = "\n".join(f"  {name:{width}}  {setting}" for name, setting in ALIASES.items())
    parser.epilog = f"every --section.field VALUE is taken; short for some of them:\n{short}"


def run(arguments: argparse.Namespace) -> int:
    """Decode the prompts and print the report."""
    overrides = list(_spelt_out(arguments.overrides))
    if arguments.config is None and not any(w.startswith("--target.path") for w in overrides):
        raise ConfigError("no target is named; give --target DIR, or settings with --config")
    settings = load_settings(arguments.config, overrides)
    if arguments.out is not None:
        check_writable(arguments.out)
    report = _measure(settings, arguments.drafter, arguments.prompts)
    try:
        if arguments.out is not None:
            atomic_write(arguments.out, report.model_dump_json(indent=1) + "\n")
    finally:  # what took minutes to measure is at least seen
        if arguments.json:
            sys.stdout.write(report.model_dump_json() + "\n")
        else:
            _show(report, arguments.drafter)
    if report.has_faults and report.exactness is not None:
        raise DFlashError(
            f"{report.exactness.num_faults} greedy texts differ from the target's own in float32: "
            "target, drafter or decoding is at fault"
        )
    return 0


def _spelt_out(words: Sequence[str]) -> Iterator[str]:
    """Yield settings words for the short ones, with their values as they are."""
    for word in words:
        name, equals, value = word.partition("=")
        yield f"{ALIASES.get(name, name)}{equals}{value}"


def _measure(settings: Settings, path: Path, source: Path) -> AcceptanceReport:
    device = device_of(settings.training)
    drafter = load_checkpoint_drafter(path)
    layers = {"layer_ids": drafter.spec.target_layer_ids}
    target = load_target(changed(settings.target, layers), device=device)
    config = settings.evaluation
    prompts = read_prompts(
        source,
        target.tokenizer,
        settings.corpus,
        max_prompts=config.max_prompts,
        drafter=path,
        tell=lambda sentence: sys.stderr.write(f"{sentence}\n"),
    )
    columns = (TextColumn("decoding"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Terminal(stderr=True)
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("", total=None)
        return evaluate_drafter(
            target,
            drafter.to(device, target.lm_head.weight.dtype),
            prompts,
            config,
            on_progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )


def _show(report: AcceptanceReport, drafter: Path) -> None:
    console = print_table(acceptance_table(report))
    print_table(speed_table(report))
    if report.num_left_out:
        console.print(
            f"{report.num_left_out:,} prompts left out: over the target's positions, or behind an "
            "answer that cannot be encoded"
        )
    if report.encoder is not None:
        console.print(f"encoder {report.encoder.digest[:8]}: {report.encoder.thinking}")
    total = max(sum(report.histogram), 1)
    shares = (f"{n}: {count / total:.0%}" for n, count in enumerate(report.histogram, start=1))
    console.print("tokens committed by a verification  " + "  ".join(shares))
    if report.exactness is not None:
        console.print(f"{report.exactness.words}, {report.dtype}")
    console.print(f"{drafter}: {report.words}", soft_wrap=True)
