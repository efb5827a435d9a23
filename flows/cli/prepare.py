"""``dflash-flow prepare``: chat files to a token store."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, get_args

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dflash_core.artifacts import check_replaceable
from dflash_core.corpus.assemble import PrepareReport, Selection
from dflash_core.corpus.config import ChatFormat, PrepareConfig, RegenerateConfig
from dflash_core.corpus.endpoint import EndpointConfig, endpoint_generate
from dflash_core.corpus.files import file_hashes, stem_of
from dflash_core.corpus.masking import ChatEncoder
from dflash_core.corpus.prepare import prepare_store
from dflash_core.corpus.regenerate import (
    Generate,
    RegenerateReport,
    regenerate_files,
)
from dflash_core.corpus.store import STORE_KIND
from dflash_core.errors import ConfigError
from tasks.terminal import Terminal

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
    parser.add_argument(
        "--regenerate", action="store_true", help="have the target write the answers anew"
    )
    parser.add_argument("--target", type=Path, metavar="DIR", help="the tokenizer's by default")
    parser.add_argument("--endpoint", metavar="URL", help="have an OpenAI-compatible server answer")
    parser.add_argument("--model", metavar="NAME", help="name of the target at the endpoint")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-new-tokens", type=int, default=512, metavar="TOKENS")
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
    check_replaceable(arguments.out, kind=STORE_KIND)
    inputs = arguments.inputs
    regenerated = None
    if arguments.regenerate:
        inputs, regenerated = _regenerate(arguments, config)
    progress = Progress(
        TextColumn("preparing"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=Terminal(stderr=True),
        disable=not sys.stderr.isatty(),
    )
    with progress:
        bar = progress.add_task("")
        report = prepare_store(
            inputs,
            arguments.tokenizer,
            arguments.out,
            config,
            workers=arguments.workers,
            selection=Selection(held_out_store=arguments.held_out),
            on_progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    if arguments.json:
        facts = report.model_dump()
        if regenerated is not None:
            facts["regenerated"] = regenerated.model_dump()
        sys.stdout.write(json.dumps(facts) + "\n")
    else:
        _show(report, arguments.out, regenerated)
    return 0


def _regenerate(
    arguments: argparse.Namespace, config: PrepareConfig
) -> tuple[list[Path], RegenerateReport]:
    """Write the answers anew beside the store, and return the file that holds them."""
    out = arguments.out.with_name(f"{arguments.out.name}.regenerated.jsonl")
    facts: dict[str, Any] = {
        "inputs": [f"{stem_of(file)} {sha}" for file, sha in file_hashes(arguments.inputs).items()],
        "format": config.format,
        "temperature": arguments.temperature,
        "max_new_tokens": arguments.max_new_tokens,
    }
    if arguments.endpoint:
        if not arguments.model:
            raise ConfigError("--endpoint needs --model, the name the target has there")
        endpoint = EndpointConfig(
            url=arguments.endpoint,
            model=arguments.model,
            temperature=arguments.temperature,
            max_new_tokens=arguments.max_new_tokens,
        )
        generate = endpoint_generate(endpoint, api_key=os.environ.get("OPENAI_API_KEY"))
        facts |= {"model": arguments.model, "endpoint": arguments.endpoint}
    else:
        from dflash_core.target import target_digest

        folder = arguments.target or arguments.tokenizer
        generate, template = _load_target(folder, arguments)
        facts |= {"target": target_digest(folder), "template": template}
    out.parent.mkdir(parents=True, exist_ok=True)
    report = regenerate_files(
        arguments.inputs, config, generate, out, facts=facts, on_progress=_tell_regenerated
    )
    return [out], report


def _tell_regenerated(done: int, total: int) -> None:
    sys.stderr.write(f"regenerated {done:,} of {total:,} conversations\n")


def _load_target(folder: Path, arguments: argparse.Namespace) -> tuple[Generate, str]:
    from dflash_core.decoding.regeneration import target_generate
    from dflash_core.target.config import TargetConfig
    from dflash_core.target.loading import load_target
    from dflash_core.training.config import TrainingConfig
    from dflash_core.training.ranks import device_of

    device = device_of(TrainingConfig())
    target = load_target(TargetConfig(path=folder, layer_ids=(0,)), device=device)
    config = RegenerateConfig(
        enabled=True,
        temperature=arguments.temperature,
        max_new_tokens=arguments.max_new_tokens,
    )
    template = ChatEncoder(target.tokenizer).finder.template.digest
    return target_generate(target, config), template


def _read(template: Path | None) -> str | None:
    if template is None:
        return None
    if not template.is_file():
        raise ConfigError(f"there is no template file {template}; mend --chat-template")
    try:
        return template.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--chat-template {template} is not UTF-8: byte {error.object[error.start]:#04x} at "
            f"{error.start}; convert it"
        ) from None


def _show(report: PrepareReport, out: Path, regenerated: RegenerateReport | None) -> None:
    console = Terminal()
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
    if regenerated is not None:
        table.add_section()
        table.add_row("answers written anew", f"{regenerated.num_regenerated:,}")
        table.add_row("  of them cut off", f"{regenerated.num_cut_off:,}")
        table.add_row("answers that keep their text", f"{regenerated.num_kept:,}")
        table.add_row("prompts refused by the server", f"{regenerated.num_refused:,}")
        table.add_row("input rows passed over", f"{regenerated.num_passed_over:,}")
    console.print(files, table)
    if report.reject_reasons:
        rejects = Table("refused because", "rows", title=f"Rejects ({out / 'rejects.jsonl'})")
        rejects.columns[1].justify = "right"
        for reason, count in report.reject_reasons.items():
            rejects.add_row(reason, f"{count:,}")
        console.print(rejects)
