"""The corpus of a run: a store to train on and a store held out, answers made anew if wanted."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dflash_core.artifacts import atomic_write, content_digest
from dflash_core.config import FrozenModel, changed
from dflash_core.corpus.answers.regenerate import Generate, RegenerateReport, regenerate_files
from dflash_core.corpus.config import CorpusConfig
from dflash_core.corpus.masking.encoder import ChatEncoder
from dflash_core.corpus.masking.spans import Message
from dflash_core.corpus.preparing.assemble import PrepareReport
from dflash_core.corpus.preparing.prepare import prepare_corpus
from dflash_core.corpus.reading.files import file_hashes, stem_of
from dflash_core.corpus.stdlib import Split, write_stdlib_chats

__all__ = [
    "CorpusReport",
    "Regenerated",
    "answers_facts",
    "build_corpus",
    "regenerate_corpus",
    "source_digest",
]

REPORT_NAME = "corpus.json"


class Regenerated(NamedTuple):
    """Chats whose answers were made anew.

    Attributes:
        file: The chats.
        report: What was written.
    """

    file: Path
    report: RegenerateReport


class CorpusReport(FrozenModel):
    """The stores of a run, and what became of the chats."""

    train: Path
    """Token store to train on."""
    held_out: Path
    """Token store to evaluate on."""
    prepared: PrepareReport
    """What became of the training rows."""
    prepared_held_out: PrepareReport
    """What became of the held-out rows."""
    regenerated: RegenerateReport | None = None
    """What the target wrote anew."""


def regenerate_corpus(
    config: CorpusConfig,
    encoder: ChatEncoder,
    out: Path,
    *,
    generate: Callable[[], Generate],
    facts: Mapping[str, Any],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Regenerated:
    """Have the answers to train on made anew, as far as an earlier call has not.

    Stopped at any moment, the same call goes on where it was.

    Args:
        config: Settings of the corpus.
        encoder: Of the target.
        out: File of the answers, the same for the same `answers_facts`.
        generate: Makes the answerer, only when there is something to answer.
        facts: As `answers_facts` gives them.
        on_progress: Called with conversations regenerated and those there are.

    Raises:
        DataError: An input is missing, or more of its rows cannot be taken than allowed.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    report = regenerate_files(
        _inputs(config, out.parent, "train"),
        config,
        encoder,
        _only_when_asked(generate),
        out,
        facts=facts,
        choose=_short_answers(config, encoder),
        on_progress=on_progress,
    )
    return Regenerated(out, report)


def build_corpus(
    config: CorpusConfig,
    tokenizer: Path | ChatEncoder,
    out: Path,
    *,
    regenerated: Regenerated | None = None,
    workers: int | None = None,
) -> CorpusReport:
    """Build both stores, or return those that an earlier call finished.

    Stopped at any moment, the same call goes on where it was.

    Args:
        config: Settings of the corpus.
        tokenizer: Tokenizer folder with a chat template, the target's, or the encoder made of it.
        out: Folder of the corpus.
        regenerated: What `regenerate_corpus` gave, which is trained on instead of the inputs.
        workers: Processes that tokenise.

    Raises:
        DataError: An input is missing or nothing is left.
    """
    finished = out / REPORT_NAME
    if finished.is_file():
        return CorpusReport.model_validate_json(finished.read_bytes())
    assert (regenerated is not None) == config.regenerate.enabled
    out.mkdir(parents=True, exist_ok=True)
    inputs = _inputs(config, out, "train") if regenerated is None else [regenerated.file]
    held_out_inputs = _inputs(config, out, "held_out")
    files = {"source": "files", "inputs": inputs, "held_out_inputs": held_out_inputs}
    train, held_out = prepare_corpus(
        changed(config, files),
        tokenizer,
        train=out / "train",
        held_out=out / "held_out",
        workers=workers,
    )
    report = CorpusReport(
        train=out / "train",
        held_out=out / "held_out",
        prepared=train,
        prepared_held_out=held_out,
        regenerated=None if regenerated is None else regenerated.report,
    )
    atomic_write(finished, report.model_dump_json(indent=1) + "\n")
    return report


def source_digest(config: CorpusConfig) -> str:
    """Return a hash of what the chats are read from: the files' bytes, or the library's.

    Raises:
        DataError: An input is missing, or is a pipe.
    """
    if config.source == "stdlib":
        return content_digest("stdlib", sys.version)
    hashes = file_hashes([*config.inputs, *config.held_out_inputs])
    return content_digest(list(hashes.values()))


def answers_facts(config: CorpusConfig, encoder: ChatEncoder, target: str) -> dict[str, Any]:
    """Return what answers made anew depend on: settings, rows, encoder and who answers.

    Args:
        config: Settings of the corpus.
        encoder: Of the target.
        target: Digest of the target's folder, where no endpoint answers.

    Raises:
        DataError: As `source_digest`.
    """
    if config.source == "stdlib":
        rows = [sys.version, str(config.max_samples)]
    else:  # a conversation is named after its file
        rows = [f"{stem_of(file)} {sha}" for file, sha in file_hashes(config.inputs).items()]
    endpoint = config.regenerate.endpoint
    who = {"endpoint": endpoint.url, "model": endpoint.model} if endpoint else {"target": target}
    how = config.regenerate.model_dump(mode="json", exclude={"enabled", "endpoint"})
    rest = {"format": config.format, "columns": config.columns, "encoder": encoder.digest}
    return {"inputs": rows, **rest, **how, **who}


def _inputs(config: CorpusConfig, out: Path, split: Split) -> list[Path]:
    """Return the chat files of a split; the library's are written first."""
    given, most, name = {
        "train": (config.inputs, config.max_samples, "chats.jsonl"),
        "held_out": (config.held_out_inputs, config.max_held_out, "held-out-chats.jsonl"),
    }[split]
    if config.source == "files":
        return list(given)
    write_stdlib_chats(out / name, split, most=most)
    return [out / name]


def _short_answers(config: CorpusConfig, encoder: ChatEncoder) -> Callable[[Message], bool]:
    """Return the test for answers that are made anew: the long tail keeps its source."""
    most = config.regenerate.max_source_tokens
    if most is None:
        return lambda answer: True
    return lambda answer: len(encoder.text_ids(str(answer.get("content") or ""))) <= most


def _only_when_asked(make: Callable[[], Generate]) -> Generate:
    made: list[Generate] = []

    def answer(prompts: Any) -> Any:
        if not made:
            made.append(make())
        return made[0](prompts)

    return answer
