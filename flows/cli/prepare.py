"""``dflash-flow prepare``: chat files to a token store."""

import argparse
import sys
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dflash_core.corpus.assemble import PrepareReport, Selection
from dflash_core.corpus.config import ChatFormat, PrepareConfig
from dflash_core.corpus.prepare import prepare
from dflash_core.errors import ConfigError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    defaults = PrepareConfig()
    parser.add_argument("inputs", nargs="+", type=Path, metavar="INPUT", help="file, folder, glob")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="STORE")
    parser.add_argument("--format", choices=get_args(ChatFormat), default=defaults.format)
    parser.add_argument("--max-length", type=int, default=defaults.max_length, metavar="TOKENS")
    parser.add_argument("--oversize", choices=("truncate", "drop"), default=defaults.oversize)
    parser.add_argument(
        "--supervise", choices=("all_turns", "last_turn_only"), default=defaults.supervise
    )
    parser.add_argument(
        "--max-reject-share", type=float, default=defaults.max_reject_share, metavar="SHARE"
    )
    parser.add_argument("--chat-template", type=Path, metavar="FILE", help="Jinja file")
    parser.add_argument(
        "--held-out", type=Path, metavar="STORE", help="leave out what this store holds"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="processes; one a core by default")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Prepare the store and print what became of the rows."""
    config = PrepareConfig(
        format=arguments.format,
        max_length=arguments.max_length,
        oversize=arguments.oversize,
        supervise=arguments.supervise,
        max_reject_share=arguments.max_reject_share,
        chat_template=_read(arguments.chat_template),
    )
    progress = Progress(
        TextColumn("preparing"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        disable=not sys.stderr.isatty(),
    )
    with progress:
        bar = progress.add_task("")
        report = prepare(
            arguments.inputs,
            arguments.tokenizer,
            arguments.out,
            config,
            workers=arguments.workers,
            selection=Selection(held_out_store=arguments.held_out),
            on_progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    if arguments.json:
        sys.stdout.write(report.model_dump_json(indent=1) + "\n")
    else:
        _show(report, arguments.out)
    return 0


def _read(template: Path | None) -> str | None:
    if template is None:
        return None
    if not template.is_file():
        raise ConfigError(f"there is no template file {template}; mend --chat-template")
    return template.read_text(encoding="utf-8")


def _show(report: PrepareReport, out: Path) -> None:
    console = Console(highlight=False)
    files = Table("file", "taken for", title="Files")
    for name, formats in report.formats.items():
        files.add_row(name, ", ".join(f"{count:,} {form}" for form, count in formats.items()))
    table = Table("what", "count", title=f"Store {out}")
    table.columns[1].justify = "right"
    for label, count in (
        ("rows read", report.num_rows),
        ("rows or threads refused", report.num_rejects),
        ("exact duplicates left out", report.num_duplicates),
        ("held-out conversations left out", report.num_leaks),
        ("ids that had occurred before", report.num_renamed),
        ("samples stored", report.num_samples),
        ("tokens", report.num_tokens),
        ("supervised tokens", report.num_supervised),
        (f"samples cut at {report.max_length:,} tokens", report.num_truncated),
        ("  tokens cut off", report.truncated_tokens),
        ("  supervised tokens cut off", report.truncated_supervised),
    ):
        table.add_row(label, f"{count:,}")
    console.print(files, table)
    if report.reject_reasons:
        rejects = Table("refused because", "rows", title=f"Rejects ({out / 'rejects.jsonl'})")
        rejects.columns[1].justify = "right"
        for reason, count in report.reject_reasons.items():
            rejects.add_row(reason, f"{count:,}")
        console.print(rejects)
