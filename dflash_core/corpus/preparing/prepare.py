"""Chat files to a token store, on all cores, in parts that a restart takes up again.

The input is cut into parts of rows by the files alone; parts are tokenised by any number of
workers and joined in their order, so the store's bytes do not depend on how many there were.
Memory holds a few parts, never the corpus; 16 bytes a row find duplicates.
"""

import fcntl
import gc
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

from dflash_core.artifacts import atomic_write, check_replaceable, content_digest, core_digest
from dflash_core.config import changed
from dflash_core.corpus.config import ROW_FIELDS, CorpusConfig, PrepareConfig
from dflash_core.corpus.masking.encoder import ChatEncoder
from dflash_core.corpus.masking.encoding import EncoderFacts
from dflash_core.corpus.masking.loading import load_encoder
from dflash_core.corpus.preparing.assemble import PrepareReport, Selection, assemble
from dflash_core.corpus.preparing.part import Tokeniser, read_part
from dflash_core.corpus.preparing.workers import WorkerDied, Workers
from dflash_core.corpus.reading.files import RawRow, find_files, iter_rows
from dflash_core.corpus.store import STORE_KIND
from dflash_core.errors import DataError, DFlashError

__all__ = ["OnProgress", "prepare_corpus", "prepare_parts", "prepare_store"]

OnProgress = Callable[[int, int], None]
"""Called with the input bytes done and those there are; compressed files count as they lie."""

ROWS_OF_A_PART = 512
BYTES_OF_A_PART = 4 << 20
PARTS_AHEAD = 3
LOCK_NAME = "lock"

Rows = list[tuple[Path, RawRow]]


@dataclass(frozen=True)
class _Chunk:
    """The rows of one part, files by their label, and the input bytes done behind it."""

    rows: Rows
    done_bytes: int


def prepare_store(
    inputs: Sequence[Path],
    tokenizer: Path | ChatEncoder,
    out: Path,
    config: PrepareConfig,
    *,
    workers: int | None = None,
    selection: Selection = Selection(),  # noqa: B008  (frozen)
    on_progress: OnProgress | None = None,
) -> PrepareReport:
    """Tokenise chat files into a token store.

    Stopped at any moment, the same call goes on with the parts that are missing.

    Args:
        inputs: Files, folders and globs.
        tokenizer: Tokenizer folder with a chat template, or an encoder with the config's template.
        out: Store directory; replaced once everything is written.
        config: Settings of rows.
        workers: Processes; one for each core when not given. Does not change a byte.
        selection: Which of the samples are stored; all unique ones when not given.
        on_progress: Called after each part.

    Returns:
        What became of the rows.

    Raises:
        DataError: An input is missing, nothing is left, or too many rows were refused; the refused
            rows then stand in ``<out>.rejects.jsonl``.
    """
    encoder = tokenizer if isinstance(tokenizer, ChatEncoder) else load_encoder(tokenizer, config)
    with prepare_parts(
        inputs, encoder, out, config, workers=workers, on_progress=on_progress
    ) as parts:
        return assemble(parts, out, config, selection, facts=_facts(inputs, encoder))


def prepare_corpus(
    config: CorpusConfig,
    tokenizer: Path | ChatEncoder,
    *,
    train: Path,
    held_out: Path,
    workers: int | None = None,
    on_progress: OnProgress | None = None,
) -> tuple[PrepareReport, PrepareReport]:
    """Tokenise a corpus into two stores that share no conversation and no tree.

    Held-out files are prepared first, and what they hold is left out of training; without such
    files a share of the conversations is held out, chosen by a hash, in one pass over the inputs.

    Args:
        config: Settings of a corpus of files.
        tokenizer: Tokenizer folder with a chat template, or an encoder with the config's template.
        train: Store directory to train on.
        held_out: Store directory to evaluate on.
        workers: Processes; one for each core when not given.
        on_progress: Called after each part.

    Returns:
        What became of the rows, for training and held-out.

    Raises:
        DataError: As `prepare_store` does.
    """
    check_replaceable(held_out, kind=STORE_KIND)
    encoder = tokenizer if isinstance(tokenizer, ChatEncoder) else load_encoder(tokenizer, config)
    side = Selection(max_samples=config.max_samples, held_out_percent=config.held_out_percent)
    if config.held_out_inputs:
        chosen = Selection(max_samples=config.max_held_out)
        held_report = prepare_store(
            config.held_out_inputs,
            encoder,
            held_out,
            config,
            workers=workers,
            selection=chosen,
        )
        train_report = prepare_store(
            config.inputs,
            encoder,
            train,
            config,
            workers=workers,
            selection=changed(side, {"held_out_store": held_out}),
            on_progress=on_progress,
        )
        return train_report, held_report
    facts = _facts(config.inputs, encoder)
    with prepare_parts(
        config.inputs, encoder, train, config, workers=workers, on_progress=on_progress
    ) as parts:
        reports = [
            assemble(
                parts,
                out,
                config,
                changed(side, {"side": name, "max_samples": most}),
                facts=facts,
            )
            for name, out, most in (
                ("train", train, config.max_samples),
                ("held_out", held_out, config.max_held_out),
            )
        ]
    return reports[0], reports[1]


@contextmanager
def prepare_parts(
    inputs: Sequence[Path],
    encoder: ChatEncoder,
    out: Path,
    config: PrepareConfig,
    *,
    workers: int | None = None,
    on_progress: OnProgress | None = None,
) -> Iterator[list[Path]]:
    """Give the finished parts of the inputs, for one or several stores; removed on success."""
    check_replaceable(out, kind=STORE_KIND)
    files, refused = find_files(inputs)
    work = out.parent / f".{out.name}.prepare"
    with _told_if_unwritable(work), _locked(work):
        _start_or_resume(work, _fingerprint(files, encoder, config))
        chunks = _chunks(files, refused)
        total = sum(file.stat().st_size for file in files)

        def tell(done: int) -> None:
            if on_progress is not None:
                on_progress(done, total)

        count = workers if workers is not None else len(os.sched_getaffinity(0))
        yield (
            _run_here(chunks, work, encoder, config, tell)
            if count <= 1
            else _run_pool(chunks, work, encoder, config, count, tell)
        )
        _remove(work)


@contextmanager
def _told_if_unwritable(work: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DFlashError(
            f"{error.filename or work} cannot be written: {error.strerror or error}; free some "
            "space or mend its rights and run the same command again, it goes on where it stopped"
        ) from error


def _facts(inputs: Sequence[Path], encoder: ChatEncoder) -> dict[str, Any]:
    return {
        "tokenizer": encoder.name,
        "inputs": [str(path) for path in inputs],
        "encoder": EncoderFacts.of(encoder).model_dump(),
    }


def _run_here(
    chunks: Iterator[_Chunk],
    work: Path,
    encoder: ChatEncoder,
    config: PrepareConfig,
    tell: Callable[[int], None],
) -> list[Path]:
    tokeniser = Tokeniser(encoder, config)
    parts = []
    for number, chunk in enumerate(chunks):
        part = _part_path(work, number)
        if read_part(part) is None:
            tokeniser.write_part(part, chunk.rows)
        parts.append(part)
        tell(chunk.done_bytes)
    return parts


def _run_pool(
    chunks: Iterator[_Chunk],
    work: Path,
    encoder: ChatEncoder,
    config: PrepareConfig,
    count: int,
    tell: Callable[[int], None],
) -> list[Path]:
    numbered = enumerate(chunks)
    parts: list[Path] = []
    waiting: list[tuple[Path, Future[None] | None, int]] = []
    # By a file: a process that dies before it has read its arguments leaves the parent writing.
    made_of = atomic_write(work / "encoder.json", encoder.to_json())
    pool = Workers(count, _start_worker, made_of, encoder.variables, config)
    with closing(pool):
        try:
            while True:
                for number, chunk in islice(numbered, count * PARTS_AHEAD - len(waiting)):
                    part = _part_path(work, number)
                    done = read_part(part) is not None
                    future = None if done else pool.submit(part, chunk.rows)
                    waiting.append((part, future, chunk.done_bytes))
                if not waiting:
                    return parts
                part, future, done_bytes = waiting.pop(0)
                if future is not None:
                    future.result()
                parts.append(part)
                tell(done_bytes)
        except WorkerDied:
            raise DFlashError(
                f"a tokenising worker died while {len(parts)} parts were done, probably for want "
                "of memory; run the same command again with fewer workers, it goes on there"
            ) from None


def _start_worker(
    made_of: Path, variables: Mapping[str, Any], config: PrepareConfig
) -> Callable[[Path, Rows], object]:
    # One thread for each worker: the processes already use every core.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokeniser = Tokeniser(ChatEncoder.from_json(made_of.read_bytes(), variables), config)
    gc.freeze()  # what is here stays: collections need not look at it again
    return tokeniser.write_part


def _chunks(files: Sequence[Path], refused: Sequence[tuple[Path, str]]) -> Iterator[_Chunk]:
    """Yield rows in order, a part at a time, across files."""
    labels = _labels([*files, *(path for path, _ in refused)])
    rows: Rows = [
        (labels[path], RawRow(0, error=f"cannot be read: {why}")) for path, why in refused
    ]
    size = done = 0
    for file in files:
        file_bytes, of_file = file.stat().st_size, 0
        for row in iter_rows(file):
            rows.append((labels[file], row))
            row_bytes = len(row.data) if isinstance(row.data, bytes) else 0
            size += row_bytes
            of_file += row_bytes
            if len(rows) >= ROWS_OF_A_PART or size >= BYTES_OF_A_PART:
                yield _Chunk(rows, done + min(of_file, file_bytes))
                rows, size = [], 0
        done += file_bytes
    if rows:
        yield _Chunk(rows, done)


def _labels(files: Sequence[Path]) -> dict[Path, Path]:
    """Name files by their path below the folder they share, the same wherever that folder lies."""
    absolute = {file: Path(os.path.abspath(file)) for file in files}  # noqa: PTH100
    shared = os.path.commonpath([path.parent for path in absolute.values()]) if files else ""
    return {file: path.relative_to(shared) for file, path in absolute.items()}


def _part_path(work: Path, number: int) -> Path:
    return work / f"part-{number:06d}.arrow"


def _fingerprint(files: Sequence[Path], encoder: ChatEncoder, config: PrepareConfig) -> str:
    """Digest whatever a part depends on; other contents, settings or code start afresh."""
    stats = [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    # The share of rejects is judged when the parts are joined.
    settings = config.model_dump(mode="json", include=ROW_FIELDS - {"max_reject_share"})
    return content_digest(stats, encoder.digest, settings, core_digest(), ROWS_OF_A_PART)


def _start_or_resume(work: Path, fingerprint: str) -> None:
    mark = work / "fingerprint"
    if not mark.is_file() or mark.read_text() != fingerprint:
        for leftover in work.glob("*.arrow"):
            leftover.unlink()
        atomic_write(mark, fingerprint)


@contextmanager
def _locked(work: Path) -> Iterator[None]:
    """Keep others out; a run that ended meanwhile may have removed what is locked."""
    with _open_lock(work) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(
                f"another process is preparing the same store ({work}); wait for it or give "
                "another --out"
            ) from None
        if os.fstat(lock.fileno()).st_nlink:
            yield
            return
    with _locked(work):
        yield


def _open_lock(work: Path) -> IO[str]:
    while True:
        work.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # removed in between by a run that ends
            return (work / LOCK_NAME).open("w")


def _remove(work: Path) -> None:
    for file in work.iterdir():
        if file.name != LOCK_NAME:  # which goes last: behind it the folder may be another's
            file.unlink()
    shutil.rmtree(work, ignore_errors=True)
