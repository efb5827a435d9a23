"""The corpus of a run: a store to train on and a store held out, answers made anew if wanted."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_core.artifacts import atomic_write, content_digest
from dflash_core.config import FrozenModel
from dflash_core.corpus.assemble import PrepareReport
from dflash_core.corpus.config import CorpusConfig
from dflash_core.corpus.files import file_hashes
from dflash_core.corpus.loading import load_tokenizer
from dflash_core.corpus.prepare import prepare_corpus
from dflash_core.corpus.regenerate import (
    Generate,
    RegenerateReport,
    iter_conversations,
    regenerate_chats,
)
from dflash_core.corpus.spans import Message
from dflash_core.corpus.stdlib import write_stdlib_chats

__all__ = ["CorpusReport", "build_corpus", "source_digest"]

REPORT_NAME = "corpus.json"


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


def build_corpus(
    config: CorpusConfig,
    tokenizer: Path,
    out: Path,
    *,
    generate: Callable[[], Generate] | None = None,
    facts: dict[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    workers: int | None = None,
) -> CorpusReport:
    """Build both stores, or return those that an earlier call finished.

    Stopped at any moment, the same call goes on where it was.

    Args:
        config: Settings of the corpus.
        tokenizer: Tokenizer folder with a chat template, the target's.
        out: Folder of the corpus.
        generate: Makes the answerer, only when there is something to answer; needed with
            ``config.regenerate.enabled``.
        facts: What regenerated answers depend on besides the settings: the target's digest.
        on_progress: Called with conversations regenerated and those there are.
        workers: Processes that tokenise.

    Raises:
        DataError: An input is missing or nothing is left.
    """
    finished = out / REPORT_NAME
    if finished.is_file():
        return CorpusReport.model_validate_json(finished.read_bytes())
    out.mkdir(parents=True, exist_ok=True)
    inputs, held_out_inputs = _inputs(config, out)
    regenerated = None
    if config.regenerate.enabled:
        assert generate is not None
        rewritten = out / "regenerated.jsonl"
        passed_over: list[str] = []
        conversations = list(
            iter_conversations(inputs, config.prepare, pass_over=passed_over.append)
        )
        total = len(conversations)
        regenerated = regenerate_chats(
            conversations,
            _only_when_asked(generate),
            rewritten,
            facts={**config.regenerate.model_dump(), **(facts or {})},
            choose=_short_answers(config, tokenizer),
            on_progress=None if on_progress is None else lambda done: on_progress(done, total),
            passed_over=passed_over,
        )
        inputs = [rewritten]
    train, held_out = prepare_corpus(
        config.model_copy(
            update={"inputs": tuple(inputs), "held_out_inputs": tuple(held_out_inputs)}
        ),
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
        regenerated=regenerated,
    )
    atomic_write(finished, report.model_dump_json(indent=1) + "\n")
    return report


def source_digest(config: CorpusConfig) -> str:
    """Return a hash of what the chats are read from: the files' bytes, or the library's.

    Raises:
        DataError: An input is missing.
    """
    if config.source == "stdlib":
        return content_digest("stdlib", sys.version)
    hashes = file_hashes([*config.inputs, *config.held_out_inputs])
    return content_digest(list(hashes.values()))


def _inputs(config: CorpusConfig, out: Path) -> tuple[list[Path], list[Path]]:
    if config.source == "files":
        return list(config.inputs), list(config.held_out_inputs)
    train, held_out = out / "chats.jsonl", out / "held-out-chats.jsonl"
    write_stdlib_chats(train, "train", most=config.max_samples)
    write_stdlib_chats(held_out, "held_out", most=config.max_held_out)
    return [train], [held_out]


def _short_answers(config: CorpusConfig, tokenizer: Path) -> Callable[[Message], bool]:
    """Return the test for answers that are made anew: the long tail keeps its source."""
    most = config.regenerate.max_source_tokens
    if most is None:
        return lambda answer: True
    loaded = load_tokenizer(tokenizer)

    def is_short(answer: Message) -> bool:
        return len(loaded.tokenize(str(answer.get("content") or ""))) <= most

    return is_short


def _only_when_asked(make: Callable[[], Generate]) -> Generate:
    made: list[Generate] = []

    def answer(prompts: Any) -> Any:
        if not made:
            made.append(make())
        return made[0](prompts)

    return answer
