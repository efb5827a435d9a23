"""Answers written anew: what is asked, what is recorded, what a restart takes up."""

import json
from pathlib import Path

import pytest

from dflash_core.corpus.answers.regenerate import (
    WINDOW,
    Answer,
    regenerate_chats,
    seed_of,
)
from dflash_core.corpus.config import PrepareConfig
from dflash_core.corpus.preparing.prepare import prepare_store
from dflash_core.corpus.reading.chats import Conversation, convert_row
from dflash_core.corpus.reading.conversations import Intake, iter_conversations
from dflash_core.corpus.store import TokenStore
from dflash_core.errors import DataError

FACTS = {"model": "echo", "temperature": 0.0}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **fields):
    return {"role": "assistant", "content": text, **fields}


def conversation(*messages, **fields) -> Conversation:
    return Conversation(messages=tuple(messages), **fields)


class Echo:
    """Answers with the last prompt and the number of messages before it; counts its calls."""

    def __init__(self, cut_off: str = "", fail_after: int | None = None) -> None:
        self.cut_off = cut_off
        self.fail_after = fail_after
        self.asked: list[list[str]] = []
        self.names: list[list[str]] = []

    def __call__(self, prompts):
        if self.fail_after is not None and len(self.asked) >= self.fail_after:
            raise ConnectionError("server gone")
        self.asked.append([prompt.messages[-1]["content"] for prompt in prompts])
        self.names.append([prompt.name for prompt in prompts])
        return [self.answer(prompt.messages) for prompt in prompts]

    def answer(self, messages):
        if messages[-1]["content"] == "too long":
            return Answer("", "refused", 0, refusal="status 400")
        text = f"{messages[-1]['content']}!{len(messages)}"
        reason = "length" if messages[-1]["content"] == self.cut_off else "stop"
        return Answer(text, reason, len(text))


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_turn_is_answered_after_the_new_ones(tmp_path: Path) -> None:
    chat = conversation(user("a"), assistant("old"), user("b"), assistant("old"), row_id="x")
    report = regenerate_chats([chat], Echo(), tmp_path / "r.jsonl", facts=FACTS)
    (row,) = rows(tmp_path / "r.jsonl")
    assert [m["content"] for m in row["messages"]] == ["a", "a!1", "b", "b!3"]
    assert row["regenerated"][1] == {
        "message": 3,
        "kept": False,
        "finish_reason": "stop",
        "num_tokens": 3,
    }
    assert (report.num_conversations, report.num_regenerated, report.num_tokens) == (1, 2, 6)


def test_each_turn_has_a_name_of_its_own_to_sample_by(tmp_path: Path) -> None:
    chats = [conversation(user("a"), assistant("x"), user("a"), assistant("x"))] * 2
    echo = Echo()
    regenerate_chats(chats, echo, tmp_path / "r.jsonl", facts=FACTS)
    assert echo.names == [["0.1", "1.1"], ["0.3", "1.3"]]
    seeds = [seed_of(0, name) for names in echo.names for name in names]
    assert len(set(seeds)) == 4 and seeds[0] == seed_of(0, "0.1") != seed_of(1, "0.1")


def test_prompts_without_answers_are_answered(tmp_path: Path) -> None:
    chat = conversation(user("a"), user("b"))
    regenerate_chats([chat], Echo(), tmp_path / "r.jsonl", facts=FACTS)
    contents = [m["content"] for m in rows(tmp_path / "r.jsonl")[0]["messages"]]
    assert contents == ["a", "a!1", "b", "b!3"]


def test_cut_off_answer_ends_its_conversation_without_an_end_token(
    tmp_path: Path, encoder, tokenizer
) -> None:
    chat = conversation(user("long"), assistant("old"), user("b"), assistant("old"))
    out = tmp_path / "r.jsonl"
    report = regenerate_chats([chat], Echo(cut_off="long"), out, facts=FACTS)
    assert report.num_cut_off == 1
    assert [m["content"] for m in rows(out)[0]["messages"]] == ["long", "long!1"]
    prepare_store([out], encoder, tmp_path / "s", PrepareConfig(), workers=1)
    (item,) = TokenStore.open(tmp_path / "s")
    assert tokenizer.decode(item.input_ids[item.loss_mask]) == "long!1"


def test_refused_prompt_ends_its_conversation_and_is_counted(
    tmp_path: Path, encoder, tokenizer
) -> None:
    chats = [
        conversation(user("a"), assistant("x"), user("too long"), assistant("x"), row_id="twice"),
        conversation(user("too long"), assistant("x"), user("b"), assistant("x"), row_id="twice"),
        conversation(user("c"), assistant("x")),
    ]
    out = tmp_path / "r.jsonl"
    report = regenerate_chats(chats, Echo(), out, facts=FACTS)
    assert [[m["content"] for m in row["messages"]] for row in rows(out)] == [
        ["a", "a!1"],
        ["too long"],
        ["c", "c!1"],
    ]
    assert (report.num_conversations, report.num_regenerated, report.num_refused) == (3, 2, 2)
    assert report.refused == ["twice: status 400", "twice: status 400"]
    prepared = prepare_store(
        [out], encoder, tmp_path / "s", PrepareConfig(max_reject_share=1), workers=1
    )
    assert prepared.reject_reasons == {"has no assistant turn to supervise": 1}


def test_tool_calls_and_answers_not_chosen_keep_their_text(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    chat = conversation(
        user("a"),
        assistant("", tool_calls=[call]),
        {"role": "tool", "content": "7"},
        assistant("old"),
        user("b"),
        assistant("keep me"),
        user("c"),
        assistant("bad", weight=0),
    )
    report = regenerate_chats(
        [chat],
        Echo(),
        tmp_path / "r.jsonl",
        facts=FACTS,
        choose=lambda answer: answer["content"] != "keep me",
    )
    row = rows(tmp_path / "r.jsonl")[0]
    contents = [m["content"] for m in row["messages"]]
    assert contents == ["a", "", "7", "7!3", "b", "keep me", "c", "bad"]
    assert row["messages"][-1]["weight"] == 0
    assert (report.num_kept, report.num_regenerated) == (3, 1)


def test_result_is_read_back_as_what_was_said(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    chat = conversation(
        user("a"), assistant("x"), row_id="id", domain="d", group="g", tools=(tool,)
    )
    regenerate_chats([chat], Echo(), tmp_path / "r.jsonl", facts=FACTS)
    (again,) = convert_row(rows(tmp_path / "r.jsonl")[0])
    assert (again.row_id, again.domain, again.group, again.tools) == ("id", "d", "g", (tool,))


@pytest.mark.parametrize("torn", [b"", b'{"id": "half'])
def test_interrupted_run_goes_on_and_gives_the_same_bytes(tmp_path: Path, torn: bytes) -> None:
    chats = [conversation(user(str(k)), assistant("x")) for k in range(2 * WINDOW + 20)]
    out = tmp_path / "r.jsonl"
    with pytest.raises(ConnectionError):
        regenerate_chats(chats, Echo(fail_after=1), out, facts=FACTS)
    with out.open("ab") as file:
        file.write(torn)
    second = Echo()
    regenerate_chats(chats, second, out, facts=FACTS)
    assert [len(batch) for batch in second.asked] == [WINDOW, 20]
    whole = Echo()
    regenerate_chats(chats, whole, tmp_path / "whole.jsonl", facts=FACTS)
    assert second.names == whole.names[1:], "what is sampled would differ"
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_finished_run_asks_nothing_again(tmp_path: Path) -> None:
    chats = [conversation(user("a"), assistant("x"))]
    first = regenerate_chats(chats, Echo(), tmp_path / "r.jsonl", facts=FACTS)
    silent = Echo(fail_after=0)
    assert regenerate_chats(chats, silent, tmp_path / "r.jsonl", facts=FACTS) == first


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    """Their windows would stand in it in turns, and each conversation twice."""
    chats = [conversation(user("a"), assistant("x"))]

    class Meanwhile(Echo):
        def __call__(self, prompts):
            with pytest.raises(DataError, match=r"another process is writing .*r\.jsonl; wait"):
                regenerate_chats(chats, Echo(), tmp_path / "r.jsonl", facts=FACTS)
            return super().__call__(prompts)

    report = regenerate_chats(chats, Meanwhile(), tmp_path / "r.jsonl", facts=FACTS)
    assert report.num_conversations == len(rows(tmp_path / "r.jsonl")) == 1


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    chats = [conversation(user("a"), assistant("x"))]
    regenerate_chats(chats, Echo(), tmp_path / "r.jsonl", facts=FACTS)
    with pytest.raises(DataError, match="begun with another temperature"):
        regenerate_chats(chats, Echo(), tmp_path / "r.jsonl", facts={**FACTS, "temperature": 0.7})


def test_a_removed_file_is_begun_anew_whatever_it_was_begun_with(tmp_path: Path) -> None:
    chats = [conversation(user("a"), assistant("x"))]
    first = regenerate_chats(chats, Echo(), tmp_path / "r.jsonl", facts=FACTS)
    (tmp_path / "r.jsonl").unlink()
    again = {**FACTS, "temperature": 0.7}
    assert regenerate_chats(chats, Echo(), tmp_path / "r.jsonl", facts=again) == first


def test_facts_stand_beside_the_file(tmp_path: Path) -> None:
    regenerate_chats([conversation(user("a"))], Echo(), tmp_path / "r.jsonl", facts=FACTS)
    meta = json.loads((tmp_path / "r.jsonl.meta.json").read_text())
    assert meta["facts"] == FACTS and meta["report"]["num_regenerated"] == 1


def test_rows_that_cannot_be_taken_are_told_and_do_not_end_the_run(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"instruction": "q", "output": "a", "history": [["x"]]}\n'
        '{"question": "q", "answer": "a"}\n'
    )
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nothing")
    (tmp_path / "b.jsonl").touch()
    intake = Intake()
    (found,) = iter_conversations([tmp_path], PrepareConfig(), intake=intake)
    assert found.row_id == "a/2"
    assert intake.passed_over == [
        f"{tmp_path / 'gone.jsonl'} cannot be read: a link to nothing",
        f"row 1 of {path} has a history of neither pairs of texts nor messages",
        f"{tmp_path / 'b.jsonl'} is empty",
    ]
    assert (intake.num_rows, intake.num_conversations) == (4, 1)


def test_conversations_of_files_are_named_by_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "q", "answer": "a"}\n{broken\n{"text": "t"}\n{"turns": ["x"]}\n')
    found = list(iter_conversations([path], PrepareConfig()))
    assert [(item.row_id, item.domain) for item in found] == [("a/1", "a"), ("a/4", "a")]


@pytest.mark.parametrize("said", ["", "\n\n"])
def test_an_answer_of_nothing_is_the_targets_own(tmp_path: Path, said: str) -> None:
    chats = [conversation(user("a"), assistant("old"))]
    out = tmp_path / "r.jsonl"
    regenerate_chats(chats, lambda asked: [Answer(said, "stop", 1)], out, facts=FACTS)
    (again,) = convert_row(rows(out)[0])
    assert again.messages[-1] == {"role": "assistant", "content": said}
