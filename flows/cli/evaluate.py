"""``dflash-flow evaluate``: what a drafter is worth on real prompts."""

import argparse
import sys
from pathlib import Path
from typing import get_args

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dflash_core.artifacts import atomic_write, check_writable
from dflash_core.corpus.config import CorpusConfig
from dflash_core.decoding import (
    AcceptanceReport,
    EvaluationConfig,
    Sampling,
    evaluate_drafter,
    read_prompts,
)
from dflash_core.errors import ConfigError, DFlashError
from dflash_core.export import load_checkpoint_drafter
from dflash_core.target.config import Dtype, TargetConfig
from dflash_core.target.loading import load_target
from tasks.terminal import Terminal

__all__ = ["add_arguments", "run"]

DEFAULTS = EvaluationConfig()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--drafter", type=Path, required=True, metavar="DIR", help="z-lab layout")
    parser.add_argument("--target", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--prompts", type=Path, required=True, metavar="FILE", help="chats, or a token store"
    )
    parser.add_argument("--max-prompts", type=int, metavar="N")
    parser.add_argument("--max-new-tokens", type=int, default=DEFAULTS.max_new_tokens, metavar="N")
    parser.add_argument("--batch-size", type=int, default=DEFAULTS.batch_size, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, greedy, by default")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--served-as",
        choices=("zlab", "speculators"),
        default=DEFAULTS.served_as,
        help="propose from the whole head, as servers of the z-lab layout do, or from the "
        "vocabulary that the drafter was trained for",
    )
    parser.add_argument("--dtype", choices=get_args(Dtype), default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-plain", action="store_true", help="do not decode without drafter")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the report there")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Decode the prompts and print the report."""
    config = EvaluationConfig(
        max_new_tokens=arguments.max_new_tokens,
        max_prompts=arguments.max_prompts,
        batch_size=arguments.batch_size,
        sampling=Sampling(
            temperature=arguments.temperature, top_p=arguments.top_p, top_k=arguments.top_k
        ),
        seed=arguments.seed,
        served_as=arguments.served_as,
        compare_plain=not arguments.no_plain,
    )
    device = _device(arguments.device)
    if arguments.out is not None:
        check_writable(arguments.out)
    drafter = load_checkpoint_drafter(arguments.drafter)
    layers = drafter.spec.target_layer_ids
    settings = TargetConfig(path=arguments.target, layer_ids=layers, dtype=arguments.dtype)
    target = load_target(settings, device=device)
    drafter = drafter.to(device, target.lm_head.weight.dtype)
    corpus = CorpusConfig()
    prompts = read_prompts(
        arguments.prompts,
        target.tokenizer,
        corpus,
        max_prompts=config.max_prompts,
        drafter=arguments.drafter,
        tell=lambda sentence: sys.stderr.write(f"{sentence}\n"),
    )
    with _progress() as progress:
        bar = progress.add_task("", total=len(prompts))
        report = evaluate_drafter(
            target, drafter, prompts, config, on_prompts=lambda n: progress.advance(bar, n)
        )
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
            f"{report.exactness.num_faults} of {report.overall.num_prompts} greedy texts differ "
            "from the target's own in float32: target, drafter or decoding is at fault"
        )
    return 0


def _device(name: str) -> torch.device:
    here = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in here:
        raise ConfigError(f"--device {name} is not on this machine; leave it out or name 'cpu'")
    return device


def _progress() -> Progress:
    return Progress(
        TextColumn("decoding"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Terminal(stderr=True),
        disable=not sys.stderr.isatty(),
    )


def _show(report: AcceptanceReport, drafter: Path) -> None:
    console = Terminal()
    table = Table("prompts", "count", "tokens", "tau", "mean of means", title=f"{drafter}")
    for column in table.columns[1:]:
        column.justify = "right"
    groups = {"all": report.overall}
    groups |= {f"domain {name or '-'}": group for name, group in report.by_domain.items()}
    groups |= {f"{name} tokens": group for name, group in report.by_prompt_length.items()}
    for name, group in groups.items():
        tokens = f"{group.num_tokens:,}"
        table.add_row(
            name, f"{group.num_prompts:,}", tokens, f"{group.tau:.2f}", f"{group.tau_mean:.2f}"
        )
    console.print(table)
    if report.num_left_out:
        console.print(f"{report.num_left_out:,} prompts left out: over the target's positions")
    total = max(sum(report.histogram), 1)
    shares = (f"{n}: {count / total:.0%}" for n, count in enumerate(report.histogram, start=1))
    console.print("tokens committed by a verification  " + "  ".join(shares))
    if report.exactness is not None:
        exact = report.exactness
        console.print(
            f"identical to the target alone: {exact.num_identical} of {report.overall.num_prompts}"
            f" ({exact.num_ties} ties, {exact.num_faults} faults, largest gap "
            f"{exact.largest_gap:.1e}, {report.dtype})"
        )
    rate = f"{report.speculative_tokens_per_s:,.0f} tokens/s"
    if report.speedup is not None:
        rate += f", {report.plain_tokens_per_s:,.0f} without drafter: {report.speedup:.2f}x"
    console.print(rate)
