"""Every shape of chat becomes the same OpenAI messages, or is refused by name."""

import json
from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.corpus.preparing.keys import ANSWERS, INPUTS, LISTS, QUESTIONS, SYSTEMS
from dflash_core.corpus.reading.chats import FORMATS, convert_row, detect_format
from dflash_core.errors import DataError

PAIR = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"})
PARTS = ("role", "from", "content", "value", "text", "tool_calls", "function_call", "weight")
OTHERS = ("name", "turns", "replies", "user", "bot", "thinking", "tools", "input_ids", "labels")
NAMES = st.sampled_from((*LISTS, *QUESTIONS, *ANSWERS, *SYSTEMS, *INPUTS, *PARTS, *OTHERS))
ROWS = st.recursive(
    st.sampled_from([None, 0, 1, 0.5, "", "q", "user", "assistant", "function_call", "[1]", "{}"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"messages": list(PAIR), "extra": 1}, "messages"),
        (list(PAIR), "messages"),
        ({"conversation": json.dumps(PAIR)}, "messages"),
        ({"history": [{**PAIR[0], "agent": "x"}, PAIR[1]]}, "messages"),
        ({"question": [[PAIR[0]], [PAIR[1]]]}, "messages"),
        ({"prompt": [PAIR[0]], "completion": [PAIR[1]]}, "instruction"),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            "sharegpt",
        ),
        ({"instruction": "q", "input": "", "context": None, "output": "a"}, "instruction"),
        ({"prompt": "other", "response": "other", "messages": list(PAIR)}, "messages"),
        ({"prompt": "q", "response": "a", "messages": []}, "instruction"),
        ({"prompt": [PAIR[0]], "response": "a"}, "instruction"),
        ({"question": [[PAIR[0]]], "answer": "a"}, "instruction"),
        ({"instruction": "q", "prompt": "q", "output": "a"}, "instruction"),
        ({"question": "q", "answer": "a"}, "instruction"),
        ({"prompt": "q", "canonical_solution": "a", "task_id": "t/1"}, "instruction"),
        ({"history": [{"user": "q", "bot": "a"}]}, "history"),
        ({"prompt": {"text": "q", "role": "prompter", "replies": []}}, "tree"),
        ({"turns": ["q"]}, "history"),
        ({"text": "q"}, "text"),
        ({"input_ids": [1], "loss_mask": [1]}, "tokenised"),
    ],
)
def test_formats_are_detected(row, form) -> None:
    assert detect_format(row) == form
    (item,) = convert_row(row)
    if form not in ("tree", "text", "tokenised") and "turns" not in row:
        assert item.messages == PAIR


@pytest.mark.parametrize("beside", [{"history": []}, {"history": [{"user": "old", "bot": "o"}]}])
@pytest.mark.parametrize("turn", [{"bot": "a"}, {"bot": None, "assistant": "a"}])
def test_pairs_are_read_where_they_were_found(beside, turn) -> None:
    (item,) = convert_row({"conversation": [{"user": "q", **turn}], **beside})
    assert item.messages == PAIR


def test_empty_list_beside_turns_does_not_count() -> None:
    (item,) = convert_row({"turns": [{"user": "q", "bot": "a"}], "history": [], "messages": []})
    assert item.messages == PAIR


@pytest.mark.parametrize(
    "content",
    [
        "a",
        ["a"],
        [{"type": "text", "text": "a"}],
        [{"type": "text", "value": "a"}],
        {"answer": "a"},
        {"text": "a"},
    ],
)
def test_contents_of_every_kind_are_text(content) -> None:
    row = {"messages": [PAIR[0], {"role": "assistant", "content": content}]}
    assert convert_row(row)[0].messages == PAIR


@pytest.mark.parametrize("name", ["input", "context"])
def test_question_that_looks_like_json_is_text(name) -> None:
    (item,) = convert_row({"question": "[1, 2]", name: "x"})
    assert item.messages[0]["content"] == "[1, 2]\n\nx"


@pytest.mark.parametrize("name", ["input", "context"])
def test_input_of_an_instruction_is_kept(name) -> None:
    (item,) = convert_row({"instruction": "add", name: "1 2", "output": "3"})
    assert item.messages[0]["content"] == "add\n\n1 2"


@pytest.mark.parametrize(
    "history",
    [
        [["q", "a"]],
        '[["q", "a"]]',
        list(PAIR),
        [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
        [{"user": "q", "bot": "a"}],
    ],
)
def test_earlier_turns_of_an_instruction_are_kept(history) -> None:
    row = {"instruction": "q2", "output": "a2", "history": history, "system": "s"}
    (item,) = convert_row(row)
    assert [message["content"] for message in item.messages] == ["s", "q", "a", "q2", "a2"]
    assert item.messages[1:3] == PAIR
    del row["output"]
    assert convert_row(row)[0].messages == item.messages[:-1]


@pytest.mark.parametrize(
    "row",
    [
        {"question": "q", "response": "a"},
        {"history": [{"user": "q", "bot": "a"}]},
        {"prompt": [PAIR[0]], "completion": [PAIR[1]]},
        {"messages": list(PAIR)},
        {"messages": [{"role": "system", "content": "s"}, *PAIR]},
    ],
)
@pytest.mark.parametrize("name", ["system", "system_prompt"])
def test_system_text_beside_a_chat_comes_first(row, name) -> None:
    (item,) = convert_row({**row, name: "s"})
    assert item.messages == ({"role": "system", "content": "s"}, *PAIR)


def test_thought_beside_an_answer_is_kept() -> None:
    (item,) = convert_row({"question": "q", "reasoning": "r", "answer": "a"})
    assert item.messages == (PAIR[0], {**PAIR[1], "reasoning_content": "r"})


def test_weight_of_an_answer_is_kept_where_it_is_none() -> None:
    answers = [{**PAIR[1], "weight": weight} for weight in (0, 1, None)]
    (item,) = convert_row({"messages": [PAIR[0], *answers]})
    assert item.messages == (PAIR[0], {**PAIR[1], "weight": 0}, PAIR[1], PAIR[1])


@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x": 1}'])
def test_tool_calls_have_object_arguments(arguments) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    row = {"messages": [PAIR[0], {"role": "assistant", "content": None, "tool_calls": [call]}]}
    message = convert_row(row)[0].messages[1]
    assert message == {"role": "assistant", "content": "", "tool_calls": [CALL]}


def test_arguments_that_are_no_object_stay_text() -> None:
    call = {"function": {"name": "f", "arguments": "{broken"}}
    row = {"messages": [PAIR[0], {"role": "assistant", "tool_calls": [call]}]}
    (found,) = convert_row(row)[0].messages[1]["tool_calls"]
    assert found["function"]["arguments"] == "{broken"


def test_function_call_and_observation_roles_become_tool_turns() -> None:
    value = '{"name": "f", "arguments": {"x": 1}}'
    turns = [("human", "q"), ("function_call", value), ("observation", "7"), ("gpt", "a")]
    chat = [{"from": role, "value": text} for role, text in turns]
    tools = '[{"name": "f", "parameters": {}}]'
    (item,) = convert_row({"conversations": chat, "tools": tools})
    assert [message["role"] for message in item.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert item.messages[1]["tool_calls"] == [CALL]
    assert item.tools == ({"type": "function", "function": {"name": "f", "parameters": {}}},)


def test_parts_give_thought_text_and_calls() -> None:
    parts = [
        {"type": "reasoning", "value": "r"},
        {"type": "text", "value": "t"},
        {"type": "tool_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
    ]
    row = {"messages": [PAIR[0], {"role": "assistant", "content": parts}]}
    message = convert_row(row)[0].messages[1]
    assert message["content"] == "t" and message["reasoning_content"] == "r"
    assert message["tool_calls"] == [CALL]


def test_tree_gives_each_thread_under_one_group() -> None:
    leaf = {"text": "a1", "role": "assistant"}
    deep = {"text": "a2", "role": "assistant", "replies": [{"text": "q2", "role": "prompter"}]}
    root = {"message_id": "m", "text": "q", "role": "prompter", "replies": [leaf, deep]}
    threads = convert_row({"message_tree_id": "t", "prompt": root})
    assert [[m["content"] for m in item.messages] for item in threads] == [
        ["q", "a1"],
        ["q", "a2", "q2"],
    ]
    assert [(item.group, item.row_id) for item in threads] == [("t", "t.0"), ("t", "t.1")]


def test_labels_make_a_mask() -> None:
    (item,) = convert_row({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]})
    assert item.loss_mask == (0, 1, 1)


def test_hash_depends_on_what_is_said_alone() -> None:
    messages = convert_row({"id": 1, "messages": list(PAIR)})[0]
    pair = convert_row({"question": "q", "answer": "a", "domain": "x"})[0]
    other = convert_row({"question": "q", "answer": "b"})[0]
    assert messages.content_hash == pair.content_hash != other.content_hash


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (5, "is a int"),
        ({"ContextTokens": 1}, "its keys are ContextTokens"),
        ({"messages": []}, "empty list of messages"),
        ({"conversations": []}, "empty list of messages"),
        ({"messages": ["hi"]}, "message 0 is a str"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown role 'narrator'"),
        ({"messages": [{"content": "x"}]}, "unknown role None"),
        ({"messages": [{"role": "user"}]}, "role 'user' has no content"),
        ({"messages": [{"role": "assistant", "content": None}]}, "'assistant' has no content"),
        ({"messages": [{"role": "user", "content": 5}]}, "content of type int"),
        ({"messages": [{"role": "user", "content": {"a": "x"}}]}, "content object of keys a"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "type 'image_url', which is no text",
        ),
        ({"messages": [{"role": "user", "content": [5]}]}, "content part of type int"),
        (
            {"conversations": [{"from": "function_call", "value": "no json"}]},
            "without a function name",
        ),
        ({"messages": list(PAIR), "tools": "none"}, "tools that are not a list"),
        ({"instruction": "q", "input": 5, "output": "a"}, "input of type int"),
        ({"instruction": "q", "output": 5}, "answer of type int"),
        ({"instruction": "q", "output": "a", "history": "none"}, "neither pairs of texts nor"),
        ({"instruction": "q", "output": "a", "history": [["x", "y", "z"]]}, "neither pairs"),
        ({"instruction": "q", "output": "a", "history": [["x", None]]}, "neither pairs"),
        ({"instruction": "q", "question": "p", "answer": "a"}, "under instruction and question"),
        ({"instruction": "q", "response": "a", "chosen": "b"}, "under response and chosen"),
        ({"instruction": "q", "input": "i", "context": "c"}, "under input and context"),
        ({"messages": list(PAIR), "chat": [PAIR[0]]}, "under messages and chat"),
        ({"messages": list(PAIR), "system": 5}, "system of type int"),
        ({"prompt": [PAIR[0]], "completion": [PAIR[1]], "input": "x"}, "input beside a list"),
        ({"prompt": [PAIR[0]], "completion": 5}, "answer of type int"),
        ({"messages": [PAIR[0], {**PAIR[1], "tool_calls": 1}]}, "tool calls of type int"),
        ({"messages": [PAIR[0], {**PAIR[1], "weight": 0.5}]}, "weight 0.5"),
        ({"messages": [PAIR[0], {**PAIR[1], "thinking": ["r"]}]}, "thought of type list"),
        ({"role": "prompter", "text": "q", "replies": 3}, "replies of type int"),
        ({"messages": list(PAIR), "tools": [{"since": date(2026, 1, 1)}]}, "unknown shape"),
        ({"history": [{"user": 5}]}, "turn 0 has no text"),
        ({"history": [{"user": "q", "bot": 5}]}, "turn 0 has an answer of type int"),
        ({"history": [{"user": "q", "bot": "a", "assistant": "b"}]}, "under bot and assistant"),
        ({"history": [{"user": "q"}], "turns": ["p"]}, "under history and turns"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "2 token ids but a mask of 1"),
        ({"input_ids": [1, "x"], "loss_mask": [1, 1]}, "no list of integers under 'input_ids'"),
        ({"input_ids": [1]}, "no list of integers under 'loss_mask'"),
    ],
)
def test_rows_that_cannot_be_taken_are_refused_by_name(row, reason) -> None:
    with pytest.raises(DataError, match=reason):
        convert_row(row)


@pytest.mark.parametrize(
    "form", ["sharegpt", "history", "tree", "text", "tokenised", "instruction"]
)
@pytest.mark.parametrize("row", [5, [], {}, [5], {"prompt": {}}, {"text": ""}])
def test_forced_formats_refuse_what_they_do_not_fit(form, row) -> None:
    with pytest.raises(DataError):
        convert_row(row, form)


@given(row=st.dictionaries(NAMES, ROWS, max_size=4), form=st.sampled_from([None, *FORMATS]))
def test_every_row_is_taken_whole_or_refused(row, form) -> None:
    try:
        found = convert_row(row, form)
    except DataError as error:
        assert "unknown shape" not in str(error)
        return
    for item in found:
        assert all(isinstance(message["content"], str) for message in item.messages)
        assert item.content_hash
