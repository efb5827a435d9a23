"""``dflash-flow profile``: how long the samples of token data are."""

import argparse
import json
import sys
from pathlib import Path

from rich.table import Table

from dflash_core.artifacts import atomic_write, check_writable
from dflash_core.profiling import LengthProfile, TokenColumns, profile_data
from tasks.terminal import Terminal

__all__ = ["add_arguments", "add_columns", "columns_of", "run"]


HELP = "token data, folders, token stores, or profiles that --save wrote, which are merged"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("paths", type=Path, nargs="+", metavar="PATH", help=HELP)
    parser.add_argument("--max-length", type=int, metavar="N", help="longest usable sample, tokens")
    parser.add_argument(
        "--oversize",
        choices=["error", "truncate", "drop"],
        default="drop",
        help="what happens to longer samples and to unusable lengths (default drop, counted)",
    )
    add_columns(parser)
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the profile as JSON")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Profile token data and show it per domain."""
    if arguments.save is not None:
        check_writable(arguments.save)
    profile = profile_data(
        arguments.paths,
        max_length=arguments.max_length,
        oversize=arguments.oversize,
        columns=columns_of(arguments),
    )
    if arguments.save is not None:
        atomic_write(arguments.save, profile.to_json() + "\n")
    if arguments.json:
        sys.stdout.write(json.dumps(profile.summary()) + "\n")
    else:
        _show(profile)
    return 0


def add_columns(parser: argparse.ArgumentParser) -> None:
    """Declare one option for the name of each column of token data."""
    for name, column in TokenColumns():
        parser.add_argument(
            f"--{name}-column", default=column, metavar="NAME", help=f"default {column}"
        )


def columns_of(arguments: argparse.Namespace) -> TokenColumns:
    """Return the column names given."""
    return TokenColumns(
        **{name: getattr(arguments, f"{name}_column") for name in TokenColumns.model_fields}
    )


def _show(profile: LengthProfile) -> None:
    table = Table("domain", "samples", "tokens", "supervised", "mean", "p50", "p90", "p99", "max")
    for column in table.columns[1:]:
        column.justify = "right"
    for name in profile.domains:
        table.add_row(name or "-", *_figures(profile.of_domain(name)))
    if len(profile.domains) != 1:
        table.add_section()
        table.add_row("all", *_figures(profile))
    console = Terminal()
    console.print(table)
    for line in _remarks(profile):
        console.print(line)


def _figures(profile: LengthProfile) -> list[str]:
    if not profile.num_samples:
        return ["0"] + ["-"] * 7
    quantiles = [f"{profile.quantile(q):,}" for q in (0.5, 0.9, 0.99, 1)]
    return [
        f"{profile.num_samples:,}",
        f"{profile.total_tokens:,}",
        f"{profile.total_supervised:,}",
        f"{profile.total_tokens / profile.num_samples:,.0f}",
        *quantiles,
    ]


def _remarks(profile: LengthProfile) -> list[str]:
    remarks = []
    if (spike := profile.truncation_spike) is not None:
        remarks.append(
            f"{spike.share:.1%} of the samples have exactly {spike.length:,} tokens, the maximum: "
            "they were probably truncated before"
        )
    found = [f"{count:,} {kind}" for kind, count in profile.bad.items() if count]
    if found:
        remarks.append(
            f"bad lengths: {', '.join(found)}; {profile.num_dropped:,} samples dropped, "
            f"{profile.num_truncated:,} truncated"
        )
    return remarks
