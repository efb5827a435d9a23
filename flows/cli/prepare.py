"""``dflash-flow prepare``: chat files to a token store."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from configs.settings import CorpusSettings, load_sections
from dflash_core.artifacts import check_replaceable
from dflash_core.config import changed
from dflash_core.corpus.answers.regenerate import Generate, RegenerateReport
from dflash_core.corpus.build import Regenerated, answers_facts, regenerate_corpus
from dflash_core.corpus.masking.encoder import ChatEncoder
from dflash_core.corpus.masking.loading import load_encoder
from dflash_core.corpus.preparing.assemble import PrepareReport, Selection
from dflash_core.corpus.preparing.prepare import prepare_store
from dflash_core.corpus.store import STORE_KIND
from dflash_core.errors import ConfigError
from tasks.terminal import Terminal

if TYPE_CHECKING:
    from dflash_core.target.loading import Target

__all__ = ["TAKES_SETTINGS", "add_arguments", "run"]

TAKES_SETTINGS = True
# Short names of settings.
ALIASES = {
    "--tokenizer": "target.path",
    "--format": "corpus.format",
    "--endpoint": "corpus.regenerate.endpoint.url",
    "--model": "corpus.regenerate.endpoint.model",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("inputs", nargs="*", metavar="INPUT", help="corpus.inputs: files, folders")
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help="settings of a run")
    for alias, setting in ALIASES.items():
        parser.add_argument(alias, dest=setting, metavar="VALUE", help=f"--{setting}")
    parser.add_argument("--regenerate", action="store_true", help="--corpus.regenerate.enabled")
    parser.add_argument("--out", type=Path, required=True, metavar="STORE")
    parser.add_argument(
        "--held-out", type=Path, metavar="STORE", help="leave out what this store holds"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="processes; one a core by default")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Prepare the store and print what became of the rows."""
    settings = load_sections(CorpusSettings, arguments.config, _words(arguments))
    config = settings.corpus
    if config.source == "stdlib":
        raise ConfigError("there is nothing to prepare; name chat files, or set corpus.inputs")
    check_replaceable(arguments.out, kind=STORE_KIND)
    encoder = load_encoder(
        settings.target.path, config, trust_remote_code=settings.target.trust_remote_code
    )
    inputs, regenerated = list(config.inputs), None
    if config.regenerate.enabled:
        anew = _regenerate(settings, encoder, arguments.out)
        inputs, regenerated = [anew.file], anew.report
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
            encoder,
            arguments.out,
            config,
            workers=arguments.workers,
            selection=Selection(held_out_store=arguments.held_out, max_samples=config.max_samples),
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


def _words(arguments: argparse.Namespace) -> list[str]:
    """Return the command's own options as settings, before those that were given as such."""
    given = {setting: getattr(arguments, setting) for setting in ALIASES.values()}
    if arguments.inputs:
        given["corpus.inputs"] = json.dumps(arguments.inputs)
    words = [word for k, v in given.items() if v is not None for word in (f"--{k}", v)]
    anew = ["--corpus.regenerate.enabled"] if arguments.regenerate else []
    return [*words, *anew, *arguments.overrides]


def _regenerate(settings: CorpusSettings, encoder: ChatEncoder, out: Path) -> Regenerated:
    """Write the answers anew beside the store."""
    config = settings.corpus
    target = ""
    if config.regenerate.endpoint is None:
        from dflash_core.target.loading import target_digest

        target = target_digest(settings.target.path)

    def load() -> "Target":
        from dflash_core.target.loading import load_target
        from dflash_core.training.config import TrainingConfig
        from dflash_core.training.ranks.groups import device_of

        # Which layers would feed a drafter does not matter here.
        plain = changed(settings.target, {"layer_ids": (0,)})
        return load_target(plain, device=device_of(TrainingConfig()))

    def generate() -> Generate:
        from dflash_core.decoding.regeneration import chosen_generate

        key = os.environ.get("OPENAI_API_KEY")
        return chosen_generate(config, encoder, load, api_key=key)

    return regenerate_corpus(
        config,
        encoder,
        out.with_name(f"{out.name}.regenerated.jsonl"),
        generate=generate,
        facts=answers_facts(config, encoder, target),
        on_progress=_tell_regenerated,
    )


def _tell_regenerated(done: int, total: int) -> None:
    sys.stderr.write(f"regenerated {done:,} of {total:,} conversations\n")


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
