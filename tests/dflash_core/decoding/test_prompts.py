import json
from itertools import cycle
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from dflash_core.corpus.config import CorpusConfig
from dflash_core.corpus.masking.loading import encoder_of
from dflash_core.corpus.preparing.prepare import prepare_store
from dflash_core.decoding.acceptance import evaluate_drafter
from dflash_core.decoding.config import EvaluationConfig
from dflash_core.decoding.plain import generate, stop_tokens
from dflash_core.decoding.prompts import read_prompts
from dflash_core.errors import DataError
from tests.dflash_core.corpus.masking import templates
from tests.dflash_core.draft.parts import small_drafter, small_target

TARGET = Path(__file__).parents[3] / "configs" / "demo_target"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET)


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(*texts: str) -> dict:
    said = zip(cycle(["user", "assistant"]), texts, strict=False)
    return {"messages": [{"role": role, "content": text} for role, text in said]}


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}])
@pytest.mark.parametrize("name", ["plain", "thinks last", "opens thought"])
def test_a_chat_file_gives_the_prompts_of_its_store(tokenizer, tmp_path, name, variables):
    template = tmp_path / "template.jinja"
    template.write_text(templates.FAITHFUL[name])
    corpus = CorpusConfig(chat_template=template, template_variables=variables)
    file = write(tmp_path / "a.jsonl", chat("q", "a"), chat("q", "a", "r", "b"))
    encoder = encoder_of(tokenizer, corpus)
    prepare_store([file], encoder, tmp_path / "s", corpus, workers=1)
    stored, read = (read_prompts(p, tokenizer, corpus) for p in (tmp_path / "s", file))
    ids = [prompt.token_ids.tolist() for prompt in read]
    assert ids == [prompt.token_ids.tolist() for prompt in stored]
    if variables:  # as a server's own prompt, which ends with an empty thought
        assert ids[0] == encoder.encode_prompt(chat("q")["messages"]).tolist()
        manifest = json.loads((tmp_path / "s" / "manifest.json").read_text())
        assert ("empty thought" in manifest["metadata"]["encoder"]["thinking"]) == (name != "plain")


def test_prompts_of_another_encoder_than_the_drafters_are_told(tokenizer, tmp_path):
    plain = CorpusConfig()
    silent = CorpusConfig(template_variables={"enable_thinking": False})
    file = write(tmp_path / "a.jsonl", chat("q", "a"))
    drafter = prepare_store([file], encoder_of(tokenizer, plain), tmp_path / "s", plain, workers=1)
    assert drafter.num_samples == 1  # its manifest stands in for the drafter's, which copies it
    told: list[str] = []
    for corpus in (plain, silent):
        read_prompts(file, tokenizer, corpus, drafter=tmp_path / "s", tell=told.append)
    (sentence,) = told
    assert "trained with another encoder" in sentence and "enable_thinking False" in sentence


def test_rows_that_the_template_refuses_are_counted_and_named(tokenizer, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(templates.REFUSES_LATE_SYSTEM)
    late = {"messages": [{"role": role, "content": "x"} for role in ("user", "user", "system")]}
    file = write(tmp_path / "a.jsonl", chat("q", "a"), late, chat("q"), chat("r"))
    few, enough = (CorpusConfig(chat_template=template, max_reject_share=m) for m in (0.2, 0.25))
    told: list[str] = []
    assert len(read_prompts(file, tokenizer, enough, tell=told.append)) == 3
    assert told[0].startswith(f"1 of 4 rows are passed over, the first: row 2 of {file} the chat")
    with pytest.raises(DataError, match=r"1 of 4 rows were .* row 2 of .*a\.jsonl .*System"):
        read_prompts(file, tokenizer, few)


MT_BENCH = {"turns": ["One?", "Two?", "Three?"], "domain": "mt"}


def test_each_user_turn_is_asked_behind_the_targets_own_answer(tokenizer, tmp_path):
    """Rows of questions alone, of which each turn is measured; the first of them are counted."""
    target = small_target(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    target.tokenizer = tokenizer
    encoder = encoder_of(tokenizer, CorpusConfig())
    file = write(tmp_path / "a.jsonl", MT_BENCH, chat("q"))
    prompts = read_prompts(file, encoder, CorpusConfig())
    settings = EvaluationConfig(max_new_tokens=6, max_prompts=1)
    report = evaluate_drafter(target, small_drafter(target), prompts, settings)
    assert {name: g.num_prompts for name, g in report.by_domain.items()} == {"mt": 3}
    assert report.exactness and report.exactness.num_faults == 0 and not report.num_left_out
    assert report.encoder and report.encoder.digest == encoder.digest
    said, turn = [], prompts[0]
    for question, measured in zip(MT_BENCH["turns"], report.per_prompt, strict=True):
        said.append({"role": "user", "content": question})
        ids = encoder.encode_prompt(said).tolist()
        assert turn is not None and turn.token_ids.tolist() == ids
        (text,) = generate(target, [ids], max_new_tokens=6)
        assert measured[0] == len(text) - 1
        turn = turn.next_turn(text.tolist(), stop_tokens(target)) if turn.next_turn else None
        said.append({"role": "assistant", "content": tokenizer.decode(text)})
    assert turn is None


def test_a_later_turn_over_the_targets_positions_is_left_out(tokenizer, tmp_path):
    (prompt,) = read_prompts(write(tmp_path / "a.jsonl", MT_BENCH), tokenizer, CorpusConfig())
    room = len(prompt.token_ids) + 8
    target = small_target(vocab_size=len(tokenizer), max_position_embeddings=room)
    target.tokenizer = tokenizer
    settings = EvaluationConfig(max_new_tokens=8)
    report = evaluate_drafter(target, small_drafter(target), [prompt], settings)
    assert (report.overall.num_prompts, report.num_left_out) == (1, 1)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("hello\n", "row 1 of .*chats.jsonl is not valid JSON"),
        ('{"x": 1}\n', "row 1 of .* has no known chat format; its keys are x"),
        ("", ".*chats.jsonl is empty"),
    ],
)
def test_a_file_without_prompts_says_why(tokenizer, tmp_path, text, why):
    file = tmp_path / "chats.jsonl"
    file.write_text(text)
    with pytest.raises(DataError, match=f"holds no prompt: {why}"):
        read_prompts(file, tokenizer, CorpusConfig())
