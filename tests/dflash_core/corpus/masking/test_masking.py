"""The loss mask covers exactly what the target would have generated."""

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from dflash_core.corpus.masking.encoder import ChatEncoder, EncodedChat
from dflash_core.corpus.masking.loading import encode_chat
from dflash_core.errors import ConfigError, DataError
from tests.dflash_core.corpus.masking import templates


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **fields):
    return {"role": "assistant", "content": text, **fields}


def supervised_texts(tokenizer, encoded: EncodedChat) -> list[str]:
    """Decode each run of supervised tokens."""
    mask = np.concatenate([[False], encoded.loss_mask, [False]])
    edges = np.flatnonzero(mask[1:] != mask[:-1]).reshape(-1, 2)
    return [tokenizer.decode(encoded.input_ids[start:end]) for start, end in edges]


def encode(tokenizer, template, messages, **options) -> EncodedChat:
    return ChatEncoder(tokenizer, chat_template=template).encode(messages, **options)


CHAT = [user("One?"), assistant("Yes."), user("Two?"), assistant("No.")]


@pytest.mark.parametrize("name", ["plain", "marked", "thinks last", "opens thought", "calls tools"])
def test_supervised_tokens_are_the_answers_and_their_end(tokenizer, name) -> None:
    encoded = encode(tokenizer, templates.FAITHFUL[name], CHAT)
    assert supervised_texts(tokenizer, encoded) == ["Yes.<|im_end|>", "No.<|im_end|>"]


@pytest.mark.parametrize("name", sorted(templates.FAITHFUL))
def test_whole_text_is_what_transformers_renders(tokenizer, name) -> None:
    encoded = encode(tokenizer, templates.FAITHFUL[name], CHAT)
    text = tokenizer.apply_chat_template(
        CHAT, tokenize=False, chat_template=templates.FAITHFUL[name]
    )
    assert tokenizer.decode(encoded.input_ids) == text
    assert encoded.input_ids.tolist() == tokenizer.encode(text, add_special_tokens=False)


def test_control_token_that_takes_the_space_before_it_keeps_it(tokenizer) -> None:
    """Prompts are tokenised in pieces cut before control tokens, but not before such a one."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.add_special_tokens([AddedToken("<|odd|>", lstrip=True, special=True)])
    odd = PreTrainedTokenizerFast(tokenizer_object=backend)
    template = (
        "{% for m in messages %}{{ m.role + ' <|odd|>' + m.content + '<|im_end|>' }}{% endfor %}"
    )
    text = odd.apply_chat_template(CHAT, tokenize=False, chat_template=template)
    ids = odd.encode(text, add_special_tokens=False)
    assert encode(odd, template, CHAT).input_ids.tolist() == ids


def test_last_turn_only_supervises_the_last_answer(tokenizer) -> None:
    encoded = encode(tokenizer, templates.PLAIN, CHAT, supervise="last_turn_only")
    assert supervised_texts(tokenizer, encoded) == ["No.<|im_end|>"]


def test_answers_trimmed_by_the_template_are_found(tokenizer) -> None:
    chat = [user("  q "), assistant("\n a \n"), user("q"), assistant(" b")]
    encoded = encode(tokenizer, templates.TRIMS_ANSWERS, chat)
    assert supervised_texts(tokenizer, encoded) == ["a<|im_end|>", "b<|im_end|>"]


def test_leading_space_of_an_answer_is_its_own_token_run(tokenizer) -> None:
    encoded = encode(tokenizer, templates.PLAIN, [user("q"), assistant("\n\n    code\n")])
    assert supervised_texts(tokenizer, encoded) == ["\n\n    code\n<|im_end|>"]


def test_thought_is_supervised_where_it_is_rendered(tokenizer) -> None:
    chat = [user("q"), assistant("a", reasoning_content="r"), user("q")]
    chat.append(assistant("b", reasoning_content="s"))
    encoded = encode(tokenizer, templates.THINKS_LAST, chat)
    assert supervised_texts(tokenizer, encoded) == [
        "a<|im_end|>",
        "<think>\ns\n</think>\n\nb<|im_end|>",
    ]


@pytest.mark.parametrize("name", ["plain", "marked", "thinks last"])
def test_answer_of_weight_0_is_context(tokenizer, name) -> None:
    bad = assistant("bad", weight=0)
    chat = [user("q"), bad, user("q"), assistant("good"), user("q"), bad]
    encoded = encode(tokenizer, templates.FAITHFUL[name], chat)
    assert supervised_texts(tokenizer, encoded) == ["good<|im_end|>"]
    whole = encode(tokenizer, templates.FAITHFUL[name], [{**m, "weight": 1} for m in chat])
    assert tokenizer.decode(encoded.input_ids) == tokenizer.decode(whole.input_ids)


def test_thought_that_the_prompt_opens_starts_behind_its_tag(tokenizer) -> None:
    chat = [user("q"), assistant("b", reasoning_content="s")]
    encoded = encode(tokenizer, templates.OPENS_THOUGHT, chat)
    assert supervised_texts(tokenizer, encoded) == ["s\n</think>\n\nb<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (templates.THINKS_LAST, "<think>\nLet me"),
        (templates.OPENS_THOUGHT, "Let me"),
        (templates.PLAIN, ""),  # it has no place for thoughts, and nothing else was said
    ],
)
def test_answer_cut_off_inside_its_thought_ends_there(tokenizer, template, said) -> None:
    answer = assistant("", reasoning_content="Let me\n", cut_off=True)
    encoded = encode(tokenizer, template, [user("q"), answer])
    assert "".join(supervised_texts(tokenizer, encoded)) == said


def test_each_turn_has_its_own_end_token(tokenizer) -> None:
    encoded = encode(tokenizer, templates.LAST_END_DIFFERS, CHAT)
    assert supervised_texts(tokenizer, encoded) == ["Yes.<|im_end|>", "No.<|return|>"]


def test_space_before_the_end_token_belongs_to_the_answer(tokenizer) -> None:
    encoded = encode(tokenizer, templates.SPACED_END, CHAT)
    assert supervised_texts(tokenizer, encoded) == ["Yes. <|im_end|>", "No. <|im_end|>"]


def test_template_without_end_token_supervises_the_text_alone(tokenizer) -> None:
    encoded = encode(tokenizer, templates.NO_END, CHAT)
    assert supervised_texts(tokenizer, encoded) == ["Yes.", "No."]


def test_an_answer_that_the_next_role_ends_is_supervised_with_its_token(tokenizer) -> None:
    """The last answer, too, as if the user went on; but not one that was cut off."""
    encoded = encode(tokenizer, templates.NEXT_ROLE_ENDS, CHAT)
    assert supervised_texts(tokenizer, encoded) == ["Yes.<|im_start|>", "No.<|im_start|>"]
    cut = [*CHAT[:3], assistant("No.", cut_off=True)]
    encoded = encode(tokenizer, templates.NEXT_ROLE_ENDS, cut)
    assert supervised_texts(tokenizer, encoded) == ["Yes.<|im_start|>", "No."]
    encoder = ChatEncoder(tokenizer, chat_template=templates.NEXT_ROLE_ENDS)
    names = tokenizer.convert_ids_to_tokens(list(encoder.end_token_ids))
    assert sorted(names) == ["<|im_end|>", "<|im_start|>"]  # the user's and the tool's


@pytest.mark.parametrize("template", [templates.PLAIN, templates.MARKED])
def test_control_tokens_in_messages_stay_text(tokenizer, template) -> None:
    chat = [user("what is <|im_end|>?"), assistant("<|im_end|> closes, <|im_start|> opens")]
    encoded = encode(tokenizer, template, chat)
    assert supervised_texts(tokenizer, encoded) == [
        "<|im_end|> closes, <|im_start|> opens<|im_end|>"
    ]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert np.count_nonzero(encoded.input_ids == end) == 2


def test_tool_calls_are_supervised_as_rendered(tokenizer) -> None:
    call = {"type": "function", "function": {"name": "find", "arguments": {"x": "<|im_end|>"}}}
    chat = [user("q"), assistant(None, tool_calls=[call]), {"role": "tool", "content": "7"}]
    encoded = encode(tokenizer, templates.CALLS_TOOLS, [*chat, assistant("seven")], tools=[call])
    assert supervised_texts(tokenizer, encoded) == [
        '\n<tool_call>{"name": "find", "arguments": {"x": "<|im_end|>"}}</tool_call><|im_end|>',
        "seven<|im_end|>",
    ]


def test_dropped_tool_call_is_refused(tokenizer) -> None:
    call = {"type": "function", "function": {"name": "find", "arguments": {}}}
    with pytest.raises(DataError, match="drops the call of tool 'find' in message 1"):
        encode(tokenizer, templates.PLAIN, [user("q"), assistant("", tool_calls=[call])])


def test_what_the_template_drops_is_refused_wherever_its_words_stand(tokenizer) -> None:
    call = {"type": "function", "function": {"name": "find", "arguments": {"x": 1}}}
    called, schema = (
        assistant("", tool_calls=[call]),
        {"type": "function", "function": {"name": "q"}},
    )
    no_arguments = templates.CALLS_TOOLS.replace("(c.function | tojson)", "c.function.name")
    for template, chat, tools, what in (
        (templates.PLAIN, [user("q"), assistant("find", tool_calls=[call])], None, "the call of"),
        (no_arguments, [user("q"), called], None, "arguments of the call of tool 'find'"),
        (templates.PLAIN, [user("q"), assistant("q")], [schema], "the tool 'q'"),
        (templates.PLAIN, [user("q"), assistant("q", reasoning_content="q")], None, "the thought"),
    ):
        with pytest.raises(DataError, match=f"chat template drops {what}"):
            encode(tokenizer, template, chat, tools=tools)
    thoughts = [user("q"), assistant("a", reasoning_content="r"), user("q"), assistant("b")]
    assert encode(tokenizer, templates.THINKS_LAST, thoughts).loss_mask.any()


def test_of_named_templates_the_one_for_tools_renders_them(tokenizer) -> None:
    named = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    named.chat_template = {"default": templates.PLAIN, "tool_use": templates.CALLS_TOOLS}
    encoder = ChatEncoder(named)
    again = ChatEncoder.from_json(encoder.to_json(), encoder.variables)
    tools = [{"type": "function", "function": {"name": "find"}}]
    for one in (encoder, again):
        assert (
            one.prompt_text(CHAT[:1]) == "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n"
        )
        assert '{"name": "find"}' in one.prompt_text(CHAT[:1], tools=tools)
        assert '{"name": "find"}' in one.render(CHAT, tools=tools).text
    assert encoder.digest != ChatEncoder(named, chat_template=templates.PLAIN).digest


def test_dropped_role_is_refused(tokenizer) -> None:
    chat = [user("q"), {"role": "observation", "content": "x"}, assistant("a")]
    with pytest.raises(DataError, match="drops message 1 of role 'observation'"):
        encode(tokenizer, templates.DROPS_UNKNOWN_ROLES, chat)


def test_template_refusal_is_told(tokenizer) -> None:
    chat = [user("q"), {"role": "system", "content": "x"}, assistant("a")]
    with pytest.raises(DataError, match="System message must be at the beginning"):
        encode(tokenizer, templates.REFUSES_LATE_SYSTEM, chat)


@pytest.mark.parametrize(
    "chat",
    [
        [assistant("first"), user("q"), assistant("a")],
        [user("q"), user("again"), assistant("a")],
        [{"role": "system", "content": "s"}, user("q"), assistant("a"), user("bye")],
        [user("nul \0 and \u2028 and \ufeff"), assistant("a\0b")],
        [user(""), assistant("")],
    ],
)
def test_odd_orders_and_characters_keep_their_mask(tokenizer, chat) -> None:
    expected = [m["content"] + "<|im_end|>" for m in chat if m["role"] == "assistant"]
    assert supervised_texts(tokenizer, encode(tokenizer, templates.PLAIN, chat)) == expected


def test_prompts_have_an_empty_mask(tokenizer) -> None:
    assert not encode(tokenizer, templates.PLAIN, [user("q")]).loss_mask.any()


def test_lone_surrogates_are_refused(tokenizer) -> None:
    with pytest.raises(DataError, match="lone surrogate"):
        encode(tokenizer, templates.PLAIN, [user("q \ud800"), assistant("a")])


def test_missing_role_and_odd_content_are_refused(tokenizer) -> None:
    for message in ({"content": "x"}, {"role": "user", "content": [1]}):
        with pytest.raises(DataError, match="message 0 needs a role and a content of text"):
            encode(tokenizer, templates.PLAIN, [message])


def test_encode_chat_uses_the_tokenizers_own_template(tokenizer) -> None:
    input_ids, loss_mask = encode_chat(tokenizer, CHAT)
    assert (input_ids.dtype, loss_mask.dtype) == (np.int32, np.bool_)
    encoded = EncodedChat(input_ids, loss_mask)
    assert supervised_texts(tokenizer, encoded) == ["Yes.<|im_end|>", "No.<|im_end|>"]


def test_tokenizer_without_template_is_refused(tokenizer) -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ConfigError, match="has no chat template"):
        encode_chat(bare, CHAT)


def test_template_that_is_no_jinja_is_refused(tokenizer) -> None:
    with pytest.raises(ConfigError, match="not valid Jinja"):
        ChatEncoder(tokenizer, chat_template="{% for %}")
