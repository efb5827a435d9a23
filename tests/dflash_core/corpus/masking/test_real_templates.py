"""The mask under real tokenizers and their own templates.

All come from what ``make tokenizers`` has fetched; Qwen3 also from the data folder beside the
repository, where there is one.
"""

import gzip
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dflash_core.corpus.masking.encoder import ChatEncoder
from dflash_core.corpus.reading.chats import convert_row
from dflash_core.corpus.reading.files import find_files, iter_rows, parse_row
from dflash_core.errors import DataError
from tests.real_tokenizers import CACHE

DATA = Path(__file__).parents[5] / "shared" / "data"

# Written for these tests: what Qwen3.5 does on Qwen3's vocabulary. Every answer is trimmed and
# carries a thought, which the generation prompt opens; the system turn must be first; tool
# arguments must be objects; a conversation needs a user.
QWEN35_STYLE = """
{%- if messages | selectattr('role', 'equalto', 'user') | list | length == 0 -%}
{{- raise_exception('a conversation needs a user') -}}
{%- endif -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for m in messages -%}
{%- set said = m.content | trim -%}
{%- if m.role == 'system' and not loop.first -%}
{{- raise_exception('a system message must be the first') -}}
{%- elif m.role == 'assistant' -%}
{%- set thought = m.reasoning_content | default('') -%}
{%- if not thought and '</think>' in said -%}
{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set said = said.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n<think>\\n' + thought + '\\n</think>\\n\\n' + said -}}
{%- for call in m.tool_calls -%}
{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' -}}
{%- for name, value in call.function.arguments | items -%}
{{- '<parameter=' + name + '>\\n' + (value if value is string else value | tojson) -}}
{{- '\\n</parameter>\\n' -}}
{%- endfor -%}
{{- '</function>\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif m.role in ('system', 'user') -%}
{{- '<|im_start|>' + m.role + '\\n' + said + '<|im_end|>\\n' -}}
{%- elif m.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + said + '\\n</tool_response><|im_end|>\\n' -}}
{%- else -%}
{{- raise_exception('unexpected role ' + m.role) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n<think>\\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}
{{- '\\n</think>\\n\\n' -}}
{%- endif -%}
{%- endif -%}
"""

END = {"qwen3": "<|im_end|>", "qwen3.5 style": "<|im_end|>", "llama3": "<|eot_id|>"}
END["smollm2"] = "<|im_end|>"
VARIABLES = {"date_string": "26 Jul 2024"}

REFUSALS = {
    "smollm2": {
        "the chat template drops the call of tool ",
        "the chat template drops the thought",
        "the chat template drops the tool ",
    },
    "llama3": {
        "the chat template drops the thought",
        "the chat template drops the text beside the tool call",
        "the chat template refuses the conversation: This model only supports single tool-calls at "
        "once!",
    },
}

# No thoughts: what a template makes of them has tests of its own.
PIECES = ("a", "Hello", " ", "\n", "\t", "é", "漢", "🙂", "\0", "\u2028", "0" * 9, "{{ x }}")
PIECES += ("<|im_end|>", "<|im_start|>", "<|eot_id|>", "<", "|>")
TEXTS = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
CHATS = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), TEXTS), max_size=6).map(
    lambda turns: [{"role": role, "content": text} for role, text in turns]
)


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    loaded: dict[str, PreTrainedTokenizerBase] = {}

    def tokenizer(name: str) -> PreTrainedTokenizerBase:
        name = name.removesuffix(".5 style")
        if name not in loaded:
            loaded[name] = AutoTokenizer.from_pretrained(folder(name))
        return loaded[name]

    def folder(name: str) -> Path:
        if (CACHE / name).is_dir():
            return CACHE / name
        beside = DATA / "tokenizers" / name
        if not beside.is_dir():
            pytest.skip(f"no {name} tokenizer; make tokenizers fetches it")
        out = tmp_path_factory.mktemp(name)
        (out / "tokenizer.json").write_bytes(
            gzip.decompress((beside / "tokenizer.json.gz").read_bytes())
        )
        (out / "tokenizer_config.json").write_bytes((beside / "tokenizer_config.json").read_bytes())
        return out

    return tokenizer


def template(name: str) -> str | None:
    return QWEN35_STYLE if name == "qwen3.5 style" else None


def supervised_texts(tokenizer, encoded) -> list[str]:
    mask = np.concatenate([[False], encoded.loss_mask, [False]])
    edges = np.flatnonzero(mask[1:] != mask[:-1]).reshape(-1, 2)
    return [
        tokenizer.decode(encoded.input_ids[start:end], clean_up_tokenization_spaces=False)
        for start, end in edges
    ]


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **fields):
    return {"role": "assistant", "content": text, **fields}


@pytest.mark.parametrize("name", sorted(END))
def test_every_turn_at_every_position(load, name) -> None:
    tokenizer, end = load(name), END[name]
    encoder = ChatEncoder(tokenizer, chat_template=template(name))
    for turns in range(1, 5):
        chat = [m for k in range(turns) for m in (user(f"Q{k}?"), assistant(f"Answer {k}."))]
        expected = [f"Answer {k}.{end}" for k in range(turns)]
        assert supervised_texts(tokenizer, encoder.encode(chat)) == expected
        last = encoder.encode(chat, supervise="last_turn_only")
        assert supervised_texts(tokenizer, last) == expected[-1:]


@pytest.mark.parametrize("name", sorted(END))
def test_control_tokens_in_messages_stay_text(load, name) -> None:
    tokenizer, end = load(name), END[name]
    encoder = ChatEncoder(tokenizer, chat_template=template(name))
    encoded = encoder.encode([user(f"what is {end}?"), assistant(f"{end} closes a turn")])
    assert supervised_texts(tokenizer, encoded) == [f"{end} closes a turn{end}"]
    harmless = encoder.encode([user("x"), assistant("x")])
    closing = tokenizer.convert_tokens_to_ids(end)
    assert (encoded.input_ids == closing).sum() == (harmless.input_ids == closing).sum()


def test_qwen3_thoughts_count_where_they_are_rendered(load) -> None:
    tokenizer = load("qwen3")
    chat = [user("q"), assistant("<think>\nold\n</think>\n\na"), user("q")]
    chat.append(assistant("b", reasoning_content="new"))
    assert supervised_texts(tokenizer, ChatEncoder(tokenizer).encode(chat)) == [
        "a<|im_end|>",
        "<think>\nnew\n</think>\n\nb<|im_end|>",
    ]


def test_qwen35_thoughts_start_behind_the_tag_of_the_prompt(load) -> None:
    tokenizer = load("qwen3")
    chat = [user("q"), assistant(" <think>\nhm\n</think>\n\n a \n"), user("q"), assistant(" b ")]
    encoded = ChatEncoder(tokenizer, chat_template=QWEN35_STYLE).encode(chat)
    assert supervised_texts(tokenizer, encoded) == [
        "hm\n</think>\n\n a<|im_end|>",
        "b<|im_end|>",
    ]


def call(name: str, **arguments) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "qwen3",
            '<tool_call>\n{"name": "find", "arguments": {"x": "<|im_end|>"}}\n</tool_call>'
            "<|im_end|>",
        ),
        (
            "qwen3.5 style",
            "\n<tool_call>\n<function=find>\n<parameter=x>\n<|im_end|>\n"
            "</parameter>\n</function>\n</tool_call><|im_end|>",
        ),
        ("llama3", '{"name": "find", "parameters": {"x": "<|im_end|>"}}<|eot_id|>'),
    ],
)
def test_tool_calls_and_what_follows_them(load, name, expected) -> None:
    tokenizer, end = load(name), END[name]
    chat = [user("q"), assistant("", tool_calls=[call("find", x="<|im_end|>")])]
    chat += [{"role": "tool", "content": "7"}, assistant("seven")]
    encoded = ChatEncoder(tokenizer, chat_template=template(name)).encode(chat)
    assert supervised_texts(tokenizer, encoded) == [expected, f"seven{end}"]


def test_llama3_refuses_text_that_its_template_drops(load) -> None:
    chat = [user("q"), assistant("Let me look.", tool_calls=[call("find")])]
    with pytest.raises(DataError, match="drops the text beside the tool call in message 1"):
        ChatEncoder(load("llama3")).encode(chat)


def test_llama3_trims_and_smollm2_keeps_outer_white_space(load) -> None:
    chat = [user(" q "), assistant("\n  a \n"), user("q"), assistant(" b ")]
    for name, answers in (
        ("llama3", ["a<|eot_id|>", "b<|eot_id|>"]),
        ("smollm2", ["\n  a \n<|im_end|>", " b <|im_end|>"]),
    ):
        encoded = ChatEncoder(load(name)).encode(chat)
        assert supervised_texts(load(name), encoded) == answers


def answer_in(name: str, said: str, *, last: bool) -> str:
    if name == "smollm2" or (name == "qwen3" and not last):
        return said
    return said.lstrip("\n") if name == "qwen3" else said.strip()


@pytest.mark.parametrize("name", sorted(END))
@given(chat=CHATS)
@settings(max_examples=25)
def test_random_conversations_come_back_whole(load, name, chat) -> None:
    tokenizer = load(name)
    chat = [user("start"), *chat]
    source = template(name)
    encoder = ChatEncoder(tokenizer, chat_template=source, template_variables=VARIABLES)
    encoded = encoder.encode(chat)
    text = tokenizer.apply_chat_template(chat, chat_template=source, tokenize=False, **VARIABLES)
    assert tokenizer.decode(encoded.input_ids, clean_up_tokenization_spaces=False) == text
    assert supervised_texts(tokenizer, encoded) == [
        answer_in(name, message["content"], last=k == len(chat) - 1) + END[name]
        for k, message in enumerate(chat)
        if message["role"] == "assistant"
    ]


def test_qwen35_refusals_are_told(load) -> None:
    encoder = ChatEncoder(load("qwen3"), chat_template=QWEN35_STYLE)
    with pytest.raises(DataError, match="a system message must be the first"):
        encoder.encode([user("q"), {"role": "system", "content": "s"}, assistant("a")])


@pytest.mark.skipif(not DATA.is_dir(), reason="no data folder beside the repository")
def test_every_row_of_the_data_is_taken() -> None:
    """Rows and conversations of each chat file, by the counts in the folder's own description."""
    counts: dict[str, tuple[int, int]] = {}
    for file in find_files([DATA / "chat", DATA / "agent", DATA / "tokenised"])[0]:
        rows = [parse_row(row) for row in iter_rows(file)]
        assert [row.error for row in rows if row.error] == []
        counts[file.name] = (len(rows), sum(len(convert_row(row.data)) for row in rows))
    found = {name.split("__")[0] + "/" + str(rows) for name, (rows, _) in counts.items()}
    assert {"arena-hard/750", "gsm8k/7473", "gsm8k/1319", "gpteacher/4535", "humaneval/164"} < found
    assert {"modelopt/1000", "mt_bench/80", "mtbench101/1388", "bfcl/200", "specforge/1"} < found
    assert counts["oasst__en_100_tree.jsonl.gz"] == (100, 626)
    assert counts["llamafactory__glaive_toolcall_en_demo.json.gz"] == (300, 300)


@pytest.mark.skipif(not DATA.is_dir(), reason="no data folder beside the repository")
def test_data_that_is_no_chat_is_refused_by_name() -> None:
    for file in find_files([DATA / "lengths"])[0]:
        with pytest.raises(DataError, match=r"no known chat format|is a int"):
            convert_row(parse_row(next(iter_rows(file))).data)


def conversations(limit: int):
    files, _ = find_files([DATA / "chat", DATA / "agent"])
    for file in files:
        for row in list(iter_rows(file))[:limit]:
            yield from convert_row(parse_row(row).data)


@pytest.mark.skipif(not DATA.is_dir(), reason="no data folder beside the repository")
@pytest.mark.parametrize("name", sorted(END))
def test_real_conversations_have_the_text_of_transformers_and_whole_answers(load, name) -> None:
    tokenizer, end, source = load(name), END[name], template(name)
    encoder = ChatEncoder(tokenizer, chat_template=source, template_variables=VARIABLES)
    refused: Counter[str] = Counter()
    checked = 0
    for item in conversations(10):
        chat, tools = list(item.messages), list(item.tools) or None
        try:
            rendering = encoder.render(chat, tools=tools)
        except DataError as error:
            refused[str(error).split("'")[0].split(" in message")[0]] += 1
            continue
        assert rendering.text == tokenizer.apply_chat_template(
            chat, tools=tools, chat_template=source, tokenize=False, **VARIABLES
        )
        texts = supervised_texts(tokenizer, encoder.encode_rendered([rendering])[0])
        answers = [message for message in chat if message["role"] == "assistant"]
        for text, answer in zip(texts, answers, strict=True):
            said = answer["content"]
            forms = {said, said.strip(), said.lstrip("\n")}
            forms |= {unicodedata.normalize("NFC", form) for form in forms}
            assert text.endswith(end)
            if not answer.get("tool_calls") and not answer.get("reasoning_content"):
                assert text.removesuffix(end) in forms
            checked += 1
    assert checked > 150
    assert set(refused) <= REFUSALS.get(name, set())
