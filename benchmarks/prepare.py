"""How much slower is preparation than the tokenizer alone?

``python -m benchmarks.prepare --tokenizer DIR CHATS...`` compares, on one thread and in CPU time,
the `tokenizers` library on text that is already rendered, our encoder on the same renderings, and
the whole way from JSON bytes to a finished part. The rounds alternate, the best of each counts.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dflash_core.corpus.config import PrepareConfig
from dflash_core.corpus.masking.loading import load_encoder, load_tokenizer
from dflash_core.corpus.masking.spans import Rendering
from dflash_core.corpus.preparing.part import Tokeniser
from dflash_core.corpus.reading.chats import convert_row
from dflash_core.corpus.reading.files import RawRow, find_files, iter_rows, parse_row
from dflash_core.errors import DataError

ROWS_OF_A_PART = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inputs", nargs="+", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=1_000, help="most rows of a file")
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    config = PrepareConfig(max_length=1 << 20)
    encoder = load_encoder(arguments.tokenizer, config)
    backend = load_tokenizer(arguments.tokenizer).backend_tokenizer
    tokeniser = Tokeniser(encoder, config)
    table = Table("file", "rows", "tokens a row", "alone tok/s", "encoder", "whole", "rendering")
    for file in find_files(arguments.inputs)[0]:
        rows = as_json_lines(file, arguments.rows)
        renderings = [encoder.render(c.messages, tools=c.tools or None) for c in chats(rows)]
        texts = [rendering.text for rendering in renderings]
        if not texts:
            continue
        best = best_times(
            {
                "alone": lambda texts=texts: backend.encode_batch(texts, add_special_tokens=False),
                "encoder": lambda r=renderings: encoder.encode_rendered(r),
                "whole": lambda rows=rows: write_parts(tokeniser, rows),
                "rendering": lambda rows=rows: render(tokeniser, rows),
            },
            arguments.rounds,
        )
        encoded = backend.encode_batch(texts, add_special_tokens=False)
        num_tokens = sum(len(item) for item in encoded)
        table.add_row(
            file.name,
            f"{len(texts):,}",
            f"{num_tokens / len(texts):.0f}",
            f"{num_tokens / best['alone']:,.0f}",
            f"{best['alone'] / best['encoder']:.2f}x",
            f"{best['alone'] / best['whole']:.2f}x",
            f"{best['rendering'] / best['whole']:.0%} of whole",
        )
    Console(width=120).print(table)


def as_json_lines(file: Path, most: int) -> list[tuple[Path, RawRow]]:
    """Return rows as the JSON bytes that a JSONL file would hold."""
    rows = [parse_row(row) for row in iter_rows(file)][:most]
    return [
        (Path(file.name), RawRow(row.number, json.dumps(row.data).encode()))
        for row in rows
        if row.error is None
    ]


def chats(rows: list[tuple[Path, RawRow]]):
    for _, row in rows:
        try:
            for item in convert_row(parse_row(row).data):
                if any(message["role"] == "assistant" for message in item.messages):
                    yield item
        except DataError:
            continue


def render(tokeniser: Tokeniser, rows: list[tuple[Path, RawRow]]) -> list[Rendering]:
    return [tokeniser.encoder.render(c.messages, tools=c.tools or None) for c in chats(rows)]


def write_parts(tokeniser: Tokeniser, rows: list[tuple[Path, RawRow]]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for start in range(0, len(rows), ROWS_OF_A_PART):
            part = Path(scratch) / f"{start}.arrow"
            tokeniser.write_part(part, rows[start : start + ROWS_OF_A_PART])


def best_times(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the least CPU seconds of each, rounds alternating."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - start)
    return best


if __name__ == "__main__":
    main()
