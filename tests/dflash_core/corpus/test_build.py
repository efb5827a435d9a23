"""The corpus of a run: both stores, answers made anew, finished once."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from dflash_core.artifacts import content_digest
from dflash_core.corpus.answers.regenerate import Answer, Generate, TurnPrompt
from dflash_core.corpus.build import (
    Regenerated,
    answers_facts,
    build_corpus,
    regenerate_corpus,
    source_digest,
)
from dflash_core.corpus.config import CorpusConfig, RegenerateConfig
from dflash_core.corpus.masking.encoder import ChatEncoder
from dflash_core.corpus.store import TokenStore
from dflash_core.errors import DataError
from tests.dflash_core.corpus.masking import templates

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
    tmp_path: Path, chats: Path, encoder: ChatEncoder
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
    regenerated = regenerate_corpus(
        config,
        encoder,
        tmp_path / "answers" / "regenerated.jsonl",
        generate=answerer(asked),
        facts={"target": "t"},
        on_progress=lambda done, total: progress.append((done, total)),
    )
    assert asked == [f"question {k}" for k in range(10, 60)]
    assert progress == [(60, 60)]
    assert regenerated.report.num_regenerated == 50
    assert regenerated.report.passed_over == [f"row 61 of {chats} is no chat but text or tokens"]
    report = build_corpus(config, encoder, tmp_path / "out", regenerated=regenerated, workers=1)
    assert report.regenerated == regenerated.report
    trained = texts(report.train, encoder)
    assert trained.count("new<|im_end|>") == 50 and trained.count(f"{LONG}<|im_end|>") == 10
    assert texts(report.held_out, encoder) == ["old<|im_end|>"]


def test_too_many_rows_that_cannot_be_taken_stop_before_the_first_answer(
    tmp_path: Path, chats: Path, encoder: ChatEncoder
) -> None:
    chats.write_text(chats.read_text() + '{"text": "no chat"}\n' * 30 + '{"odd": 1}\n' * 10)
    asked: list[str] = []

    def regenerate(most: float) -> Regenerated:
        return regenerate_corpus(
            CorpusConfig(inputs=(chats,), max_reject_share=most),
            encoder,
            tmp_path / "answers" / "regenerated.jsonl",
            generate=answerer(asked),
            facts={},
        )

    sentence = r"10 of 100 rows were refused .*than max_reject_share 0.09.* its keys are odd"
    with pytest.raises(DataError, match=sentence):
        regenerate(0.09)
    assert not asked
    refused = (tmp_path / "answers" / "regenerated.rejects.jsonl").read_text().splitlines()
    assert [json.loads(line)["line"] for line in refused] == list(range(91, 101))
    report = regenerate(0.1).report
    assert len(asked) == report.num_conversations == 60 and report.num_passed_over == 40
    reason = "has no known chat format; its keys are odd"
    assert report.passed_over[0] == f"row 91 of {chats} {reason}"


def test_a_row_that_the_template_refuses_costs_no_answer(
    tmp_path: Path, chats: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    late = {"messages": [{"role": role, "content": "x"} for role in ("user", "system", "user")]}
    chats.write_text(chats.read_text() + json.dumps(late) + "\n")
    encoder = ChatEncoder(tokenizer, chat_template=templates.REFUSES_LATE_SYSTEM)
    asked: list[str] = []

    def regenerate(most: float) -> Regenerated:
        config = CorpusConfig(inputs=(chats,), max_reject_share=most)
        make = answerer(asked)
        return regenerate_corpus(config, encoder, tmp_path / "r.jsonl", generate=make, facts={})

    with pytest.raises(DataError, match=r"1 of 61 rows were refused .*System message must"):
        regenerate(0.01)
    assert not asked
    (named,) = regenerate(0.05).report.passed_over
    assert len(asked) == 60 and named.startswith(f"row 61 of {chats} the chat template refuses")


def test_answers_outlive_settings_that_they_do_not_depend_on(
    chats: Path, encoder: ChatEncoder
) -> None:
    def digest(**fields: Any) -> str:
        config = CorpusConfig(**{"inputs": (chats,), **fields})
        return content_digest(answers_facts(config, encoder, "target"))

    moved = chats.with_name("deep") / chats.name
    moved.parent.mkdir()
    moved.write_bytes(chats.read_bytes())
    same = {"max_reject_share": 0.5, "max_length": 99, "held_out_percent": 9, "inputs": (moved,)}
    assert {digest(**{name: value}) for name, value in same.items()} == {digest()}
    other = RegenerateConfig(max_new_tokens=7)
    assert len({digest(), digest(format="history"), digest(regenerate=other)}) == 3
    stdlib = [digest(inputs=(), max_samples=most) for most in (5, 6)]
    before = digest()
    chats.write_text(chats.read_text() + "\n")
    assert len({*stdlib, before, digest()}) == 4


def test_digest_of_the_source_is_that_of_its_bytes(chats: Path) -> None:
    config = CorpusConfig(inputs=(chats,))
    before = source_digest(config)
    assert source_digest(config) == before
    chats.write_text(chats.read_text() + "\n")
    assert source_digest(config) != before


def test_stores_and_plans_of_corpora_need_no_torch() -> None:
    program = (
        "import sys, dflash_core.corpus, dflash_core.corpus.build; "
        "import dflash_core.corpus.preparing.prepare; "
        "print(sorted({'torch', 'transformers', 'prefect', 'mlflow'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr
