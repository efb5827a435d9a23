"""``dflash-flow inspect``: what a token store holds, down to one token."""

import argparse
import json
import sys
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from dflash_core.corpus.store import Sample, TokenStore
from dflash_core.errors import ConfigError
from tasks.terminal import Terminal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["add_arguments", "run"]

SUPERVISED = "black on green"
MARKS = ("⟦", "⟧")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("store", type=Path, metavar="STORE")
    parser.add_argument("--row", type=int, metavar="N", help="show this sample, counted from 0")
    parser.add_argument("--tokens", action="store_true", help="show the sample token by token")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="the store's own by default")
    parser.add_argument("--verify", action="store_true", help="compare each shard with its hash")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Show the store's counts, or one of its samples."""
    store = TokenStore.open(arguments.store, verify=arguments.verify)
    if arguments.row is None:
        facts = _summary(store)
        if arguments.json:
            sys.stdout.write(json.dumps(facts) + "\n")
        else:
            _show_summary(facts, verified=arguments.verify)
        return 0
    if not 0 <= arguments.row < len(store):
        raise ConfigError(
            f"row {arguments.row} is not in {arguments.store}, which holds {len(store):,} samples; "
            f"give --row from 0 to {len(store) - 1}"
        )
    sample = store[arguments.row]
    tokenizer = _tokenizer(arguments.tokenizer, store)
    if arguments.json:
        sys.stdout.write(json.dumps(_as_json(sample, tokenizer)) + "\n")
    elif arguments.tokens:
        _show_tokens(sample, tokenizer)
    else:
        _show_text(sample, tokenizer)
    return 0


def _summary(store: TokenStore) -> dict[str, Any]:
    lengths, supervised = store.lengths, store.supervised
    domains: dict[str, list[int]] = {}
    for name, length, own in zip(store.domains, lengths, supervised, strict=True):
        counts = domains.setdefault(name, [0, 0, 0])
        counts[0] += 1
        counts[1] += int(length)
        counts[2] += int(own)
    return {
        "path": str(store.path),
        "content_hash": store.content_hash,
        "num_samples": len(store),
        "num_tokens": int(lengths.sum()),
        "num_supervised": int(supervised.sum()),
        "max_length": int(lengths.max(initial=0)),
        "domains": {
            name: dict(zip(("samples", "tokens", "supervised"), counts, strict=True))
            for name, counts in sorted(domains.items())
        },
    }


def _show_summary(facts: dict[str, Any], *, verified: bool) -> None:
    table = Table("domain", "samples", "tokens", "supervised", "share", title=facts["path"])
    for column in table.columns[1:]:
        column.justify = "right"
    for name, counts in facts["domains"].items():
        table.add_row(name, *_figures(counts["samples"], counts["tokens"], counts["supervised"]))
    table.add_section()
    total = (facts["num_samples"], facts["num_tokens"], facts["num_supervised"])
    table.add_row("all", *_figures(*total))
    console = Terminal()
    console.print(table)
    checked = "; every shard agrees with its hash" if verified else ""
    content = facts["content_hash"][:12]
    console.print(f"longest sample {facts['max_length']:,} tokens; content {content}{checked}")


def _figures(samples: int, tokens: int, supervised: int) -> tuple[str, ...]:
    return f"{samples:,}", f"{tokens:,}", f"{supervised:,}", f"{supervised / max(tokens, 1):.1%}"


def _tokenizer(folder: Path | None, store: TokenStore) -> "PreTrainedTokenizerBase":
    from dflash_core.corpus.masking.loading import load_tokenizer

    folder = folder or (Path(name) if (name := store.manifest.metadata.get("tokenizer")) else None)
    if folder is None:
        raise ConfigError(f"{store.path} does not name its tokenizer; give it with --tokenizer")
    return load_tokenizer(folder)


def _runs(sample: Sample, tokenizer: "PreTrainedTokenizerBase") -> list[tuple[bool, str]]:
    """Return the sample's text in runs of supervised and other tokens."""
    pairs = zip(sample.loss_mask.tolist(), sample.input_ids.tolist(), strict=True)
    return [
        (supervised, str(tokenizer.decode([token for _, token in run])))
        for supervised, run in groupby(pairs, key=lambda pair: pair[0])
    ]


def _as_json(sample: Sample, tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    return {
        "sample_id": sample.sample_id,
        "domain": sample.domain,
        "length": len(sample.input_ids),
        "supervised": int(sample.loss_mask.sum()),
        "runs": [{"supervised": own, "text": text} for own, text in _runs(sample, tokenizer)],
    }


def _show_text(sample: Sample, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Print the conversation; supervised text is coloured, or in brackets where colours are not."""
    console = Terminal(soft_wrap=True)
    text = Text()
    for supervised, piece in _runs(sample, tokenizer):
        if not supervised:
            text.append(piece)
        elif console.is_terminal:
            text.append(piece, style=SUPERVISED)
        else:
            text.append(f"{MARKS[0]}{piece}{MARKS[1]}")
    console.print(_heading(sample))
    console.print(text)


def _show_tokens(sample: Sample, tokenizer: "PreTrainedTokenizerBase") -> None:
    console = Terminal(soft_wrap=True)
    console.print(_heading(sample))
    width = len(str(len(sample.input_ids)))
    pairs = zip(sample.input_ids.tolist(), sample.loss_mask.tolist(), strict=True)
    for position, (token, supervised) in enumerate(pairs):
        piece = repr(tokenizer.decode([token]))
        line = f"{position:{width}} {token:7} {'*' if supervised else ' '} {piece}"
        console.print(Text(line, style=SUPERVISED if supervised else ""))


def _heading(sample: Sample) -> Text:
    counts = Counter(sample.loss_mask.tolist())
    return Text(
        f"{sample.sample_id} ({sample.domain}): {len(sample.input_ids):,} tokens, "
        f"{counts[True]:,} supervised",
        style="bold",
    )
