"""What a row says beside its chat, in the words of other trainers, is read or refused by name."""

import json

import pytest

from dflash_core.corpus.reading.chats import convert_row
from dflash_core.errors import DataError

ASK, ANSWER, OTHER = (
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a"},
    {"role": "assistant", "content": "b"},
)
PAIR = (ASK, ANSWER)
CALLS = [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]
CALLED = [{"type": "function", "function": call} for call in CALLS]


def messages_of(row: object) -> tuple:
    (item,) = convert_row(row)
    return item.messages


@pytest.mark.parametrize("name", ["weight", "loss", "loss_weight", "loss_scale", "train"])
@pytest.mark.parametrize("flag", [0, 0.0, False])
def test_answers_not_to_learn_from_have_weight_0_in_every_spelling(name, flag) -> None:
    parts = [{"type": "text", "text": "a", name: flag}]
    for answer in ({**ANSWER, name: flag}, {"role": "assistant", "content": parts}):
        first, again = messages_of([ASK, answer, ASK, {**ANSWER, name: True}])[1::2]
        assert first == {**ANSWER, "weight": 0} and again == ANSWER
    with pytest.raises(DataError, match="neither 0 nor 1"):
        convert_row([ASK, {**ANSWER, name: 0.5}])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([{**ASK, "train": True}, ANSWER], "message 0 of role 'user' is to be learnt from"),
        ([ASK, {**ANSWER, "loss": True, "weight": 0}], "different things under weight and loss"),
        ([ASK, {**ANSWER, "train_detail": [{"train": False}]}], "message 1 has 'train_detail'"),
        (
            [ASK, {**ANSWER, "content": [{"text": "a", "train": False}, {"text": "b"}]}],
            "parts that are learnt from",
        ),
        ({"messages": list(PAIR), "label": False}, "not wanted .'label' is false"),
        ({"prompt": "q", "completion": "a", "label": "False"}, "not wanted"),
        ({"conversations": list(PAIR), "kto_tag": False}, "'kto_tag' is false"),
        ({"messages": list(PAIR), "images": ["x.jpg"]}, "something under 'images'"),
        ({"query": "q", "response": "a", "audios": ["x.wav"]}, "something under 'audios'"),
        ({"query": "q", "response": "a", "video_path": "x.mp4"}, "something under 'video_path'"),
        ({"messages": list(PAIR), "documents": [{"text": "d"}]}, "'documents', which its prompt"),
        ([{**ASK, "images": ["x"]}, ANSWER], "message 0 has something under 'images'"),
        ({"messages": list(PAIR), "enable_thinking": False}, "corpus.template_variables"),
        ({"messages": list(PAIR), "chosen": OTHER}, "does not continue it"),
        ({"messages": list(PAIR), "tools": [{"type": "web"}]}, "tool without a function name"),
        ([{"role": "system", "content": "s", "functions": "[1]"}, *PAIR], "has its own functions"),
        ({"problem": "q", "solution": "a", "answer": "4"}, "under answer and solution"),
        ({"task": 1, "traj": list(PAIR)}, r"'traj' looks like a chat: set corpus.columns to"),
        ({"prompt": "q", "traj": list(PAIR)}, "'traj' looks like a chat"),
        ({"conversation_a": list(PAIR), "winner": "a"}, "'conversation_a' looks like a chat"),
        ({"message_id": "2", "parent_id": "1", "role": "assistant", "text": "a"}, "of a tree"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(row, reason) -> None:
    with pytest.raises(DataError, match=reason):
        convert_row(row)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASK], "chosen": ANSWER, "rejected": OTHER},
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "a"},
        },
        {"prompt": [ASK], "chosen": [ANSWER], "rejected": [OTHER]},
        {"prompt": "q", "chosen": list(PAIR), "rejected": [ASK, OTHER]},
        {"prompt": "q", "chosen": list(PAIR), "messages": list(PAIR)},
        {"chosen": list(PAIR), "rejected": [ASK, OTHER]},
        {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"},
        {"prompt": "\n\nHuman: q\n\nAssistant:", "completion": "a"},
        {"input": {"messages": [ASK], "tools": []}, "preferred_output": [ANSWER]},
        {"custom_id": "1", "method": "POST", "body": {"messages": list(PAIR)}},
        {"messages": [ASK], "answer": "a"},
        {"messages": list(PAIR), "rejected_response": "b", "images": [], "label": True},
        {"messages": list(PAIR), "chat_template_kwargs": {"enable_thinking": None, "tools": [""]}},
        {"problem": "q", "solution": "a"},
        {"input": "q", "output": "a"},
        {"human": "q", "assistant": "a"},
        {"conversations": {"from": ["human", "gpt"], "value": ["q", "a"]}},
        {"conversation": [{"human": "q", "assistant": "a"}]},
        {"conversation": [{"input": "q", "output": "a"}]},
        {"instruction": "", "input": "q", "output": "a"},
        {"conversation": [ASK, {"role": "Chatbot", "content": None, "text": "a"}]},
    ],
)
def test_chosen_answers_pairs_and_envelopes_are_read(row) -> None:
    assert messages_of(row) == PAIR


def test_columns_say_which_key_is_what() -> None:
    row = {"problem": "q", "solution": "a", "answer": "4", "traj": [ASK]}
    (item,) = convert_row(row, columns={"response": "solution"})
    assert item.messages == PAIR
    (item,) = convert_row(row, columns={"messages": "traj", "completion": "answer"})
    assert item.messages == (ASK, {"role": "assistant", "content": "4"})
    with pytest.raises(DataError, match=r"no key 'run', which corpus.columns names for 'messages'"):
        convert_row(row, columns={"messages": "run"})


def test_empty_answers_are_none() -> None:
    assert messages_of({"prompt": "q", "response": " "}) == (ASK,)
    silent = {"role": "assistant", "content": ""}
    assert messages_of([ASK, silent, ASK, silent]) == (ASK, {**silent, "weight": 0}, ASK)


def test_calls_of_one_turn_stand_in_one_message() -> None:
    told = [json.dumps(call) for call in CALLS]
    one = [("human", "q"), ("function_call", json.dumps(CALLS)), ("gpt", "a")]
    two = [("human", "q"), *[("function_call", call) for call in told], ("gpt", "a")]
    said = [("human", "q"), ("gpt", "b"), *[("tool_call", call) for call in told], ("gpt", "a")]
    for turns, text in ((one, ""), (two, ""), (said, "b")):
        chat = [{"from": name, "value": value} for name, value in turns]
        called = {"role": "assistant", "content": text, "tool_calls": CALLED}
        assert messages_of({"conversations": chat}) == (ASK, called, ANSWER)
    row = {"query": "q", "answers": json.dumps(CALLS), "tools": json.dumps(CALLS)}
    assert messages_of(row) == (ASK, {"role": "assistant", "content": "", "tool_calls": CALLED})


@pytest.mark.parametrize("name", ["tools", "functions", "tool_defs"])
@pytest.mark.parametrize("make", [list, json.dumps, lambda tools: list(map(json.dumps, tools))])
def test_schemas_are_read_under_each_of_their_names(name, make) -> None:
    tool = {"name": "f", "parameters": {"x": {"default": None}}}
    (item,) = convert_row({"messages": list(PAIR), name: make([tool])})
    assert item.tools == ({"type": "function", "function": tool},)


@pytest.mark.parametrize("result", [{"value": 3, "unit": "C"}, {"text": "x"}, [1, {"a": 2}], 7])
def test_results_of_tools_stay_whole(result) -> None:
    call = {"role": "assistant", "tool_calls": [{"function": CALLS[0]}]}
    messages = messages_of([ASK, call, {"role": "tool", "content": result}, ANSWER])
    assert json.loads(messages[2]["content"]) == result


def test_token_rows_lose_their_padding_and_what_carries_no_loss() -> None:
    row = {"input_ids": [0, 0, 5, 6, 7, 0], "attention_mask": [0, 0, 1, 1, 1, 0]}
    labels = {"labels": [-100, -100, -100, 6, 7, -100]}
    (item,) = convert_row({**row, **labels, "loss_mask": [1, 1, 1, 1, 0, 1]})
    assert (item.input_ids, item.loss_mask) == ((5, 6, 7), (0, 1, 0))
    with pytest.raises(DataError, match="padding between its tokens"):
        convert_row({**row, **labels, "attention_mask": [1, 0, 1, 1, 1, 1]})
    with pytest.raises(DataError, match="labels other than its own input_ids"):
        convert_row({"input_ids": [5, 6], "labels": [6, -100]})
