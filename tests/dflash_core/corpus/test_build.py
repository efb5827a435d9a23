"""The corpus of a run: both stores, answers made anew, finished once."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dflash_core.corpus.build import build_corpus, source_digest
from dflash_core.corpus.config import CorpusConfig, RegenerateConfig
from dflash_core.corpus.masking import ChatEncoder
from dflash_core.corpus.regenerate import Answer, Generate, TurnPrompt
from dflash_core.corpus.store import TokenStore

LONG = "a long answer " * 20


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    rows = [{"question": f"question {k}", "answer": LONG if k < 10 else "old"} for k in range(60)]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answerer(asked: list[str]) -> Callable[[], Generate]:
    def generate(prompts: Sequence[TurnPrompt]) -> list[Answer]:
        asked.extend(str(prompt.messages[-1]["content"]) for prompt in prompts)
        return [Answer("new", "stop", 1) for _ in prompts]

    return lambda: generate


def texts(store: Path, encoder: ChatEncoder) -> list[str]:
    return [encoder.decode(s.input_ids[s.loss_mask].tolist()) for s in TokenStore.open(store)]


def test_files_become_two_stores_once(tmp_path: Path, chats: Path, tokenizer_folder: Path) -> None:
    config = CorpusConfig(inputs=(chats,), held_out_percent=30)
    report = build_corpus(config, tokenizer_folder, tmp_path / "out", workers=1)
    counts = len(TokenStore.open(report.train)), len(TokenStore.open(report.held_out))
    assert sum(counts) == 60 and min(counts) > 0
    assert counts == (report.prepared.num_samples, report.prepared_held_out.num_samples)
    chats.unlink()
    assert build_corpus(config, tokenizer_folder, tmp_path / "out") == report


def test_short_answers_are_the_targets_own(
    tmp_path: Path, chats: Path, tokenizer_folder: Path, encoder: ChatEncoder
) -> None:
    config = CorpusConfig(
        inputs=(chats,),
        held_out_inputs=(chats.with_name("held.jsonl"),),
        regenerate=RegenerateConfig(enabled=True, max_source_tokens=40),
    )
    chats.write_text(chats.read_text() + '{"text": "no chat"}\n')
    chats.with_name("held.jsonl").write_text('{"question": "question 59", "answer": "old"}\n')
    asked: list[str] = []
    progress: list[tuple[int, int]] = []
    report = build_corpus(
        config,
        tokenizer_folder,
        tmp_path / "out",
        generate=answerer(asked),
        on_progress=lambda done, total: progress.append((done, total)),
        workers=1,
    )
    assert asked == [f"question {k}" for k in range(10, 60)]
    assert progress[-1] == (60, 60)
    assert report.regenerated is not None and report.regenerated.num_regenerated == 50
    assert report.regenerated.passed_over == ["row 61 is no chat but text or tokens"]
    trained = texts(report.train, encoder)
    assert trained.count("new<|im_end|>") == 50 and trained.count(f"{LONG}<|im_end|>") == 10
    assert texts(report.held_out, encoder) == ["old<|im_end|>"]


def test_digest_of_the_source_is_that_of_its_bytes(chats: Path) -> None:
    config = CorpusConfig(inputs=(chats,))
    before = source_digest(config)
    assert source_digest(config) == before
    chats.write_text(chats.read_text() + "\n")
    assert source_digest(config) != before


def test_stores_and_plans_of_corpora_need_no_torch() -> None:
    program = (
        "import sys, dflash_core.corpus, dflash_core.corpus.build, dflash_core.corpus.prepare; "
        "print(sorted({'torch', 'transformers', 'prefect', 'mlflow'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr
