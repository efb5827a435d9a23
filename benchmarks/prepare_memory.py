"""Does preparation need more memory for more rows?

``python -m benchmarks.prepare_memory --tokenizer DIR --rows 50000 500000`` writes files of short
chats, no two alike, prepares each in a process of its own and prints the peak resident memory of
the main process (mapped files included) and of the largest worker.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dflash_core.corpus.config import PrepareConfig
from dflash_core.corpus.preparing.prepare import prepare_store

SENTENCE = "the model reads a short question and writes some lines of plain text about it"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[50_000, 500_000])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--here", action="store_true", help="measure this very process")
    arguments = parser.parse_args()
    for num_rows in arguments.rows:
        if arguments.here:
            measure(arguments.tokenizer, num_rows, arguments.workers)
            continue
        program = [sys.executable, "-m", "benchmarks.prepare_memory", "--here"]
        options = ["--tokenizer", str(arguments.tokenizer), "--workers", str(arguments.workers)]
        subprocess.run([*program, *options, "--rows", str(num_rows)], check=True)


def measure(tokenizer: Path, num_rows: int, workers: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        chats = Path(scratch) / "chats.jsonl"
        write_chats(chats, num_rows)
        start = time.perf_counter()
        report = prepare_store(
            [chats], tokenizer, Path(scratch) / "store", PrepareConfig(), workers=workers
        )
        seconds = time.perf_counter() - start
    own, worker = (
        resource.getrusage(who).ru_maxrss / 1024
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    print(
        f"{report.num_samples:,} rows, {report.num_tokens:,} tokens in {seconds:.0f} s: "
        f"main {own:.0f} MiB, largest worker {worker:.0f} MiB"
    )


def write_chats(file: Path, num_rows: int) -> None:
    draw, words = random.Random(0), SENTENCE.split()
    with file.open("w") as out:
        for number in range(num_rows):
            question, answer = (" ".join(draw.choices(words, k=count)) for count in (15, 20))
            row = {"question": f"{number}: {question}?", "answer": answer, "id": f"row-{number}"}
            out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
