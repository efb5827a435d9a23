"""Random conversations through every small template: mask and text come back whole."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.corpus.masking.encoder import ChatEncoder
from tests.dflash_core.corpus.masking import templates
from tests.dflash_core.corpus.masking.test_masking import supervised_texts

# Letters, blanks, tags, control tokens of the vocabulary, and characters that split badly.
ORDINARY = ("a", "Hello", " ", "\n", "\t", "  ", "é", "漢", "🙂", "\0", "\u2028", "\ufeff", "0" * 9)
TRAPS = ("<think>", "</think>", "<|im_end|>", "<|im_start|>", "<|return|>", "<", "|>", "{{ x }}")
PIECES = st.sampled_from(ORDINARY + TRAPS)
TEXTS = st.lists(PIECES, max_size=6).map("".join)
ROLES = st.sampled_from(["user", "assistant"])
CHATS = st.lists(st.tuples(ROLES, TEXTS), min_size=1, max_size=6).map(
    lambda turns: [{"role": role, "content": text} for role, text in turns]
)


def expected_answer(name: str, content: str, *, last: bool) -> str:
    content = content.strip() if name == "trims answers" else content
    if name == "no end":
        return content
    if name == "spaced end":
        return f"{content} <|im_end|>"
    return content + ("<|return|>" if name == "last end differs" and last else "<|im_end|>")


@pytest.fixture(scope="module")
def encoders(tokenizer):
    return {
        name: ChatEncoder(tokenizer, chat_template=source)
        for name, source in templates.FAITHFUL.items()
    }


@pytest.mark.parametrize("name", sorted(templates.FAITHFUL))
@given(chat=CHATS)
@settings(max_examples=30)
def test_supervised_text_is_each_answer_and_its_end(tokenizer, encoders, name, chat) -> None:
    encoded = encoders[name].encode(chat)
    answers = [
        expected_answer(name, message["content"], last=k == len(chat) - 1)
        for k, message in enumerate(chat)
        if message["role"] == "assistant"
    ]
    # Answers that touch one another, without a header between them, decode as one run.
    assert "".join(supervised_texts(tokenizer, encoded)) == "".join(answers)


@pytest.mark.parametrize("name", sorted(templates.FAITHFUL))
@given(chat=CHATS)
@settings(max_examples=30)
def test_all_tokens_decode_to_the_rendered_text(tokenizer, encoders, name, chat) -> None:
    encoded = encoders[name].encode(chat)
    text = tokenizer.apply_chat_template(
        chat, tokenize=False, chat_template=templates.FAITHFUL[name]
    )
    assert tokenizer.decode(encoded.input_ids) == text


@pytest.mark.parametrize("name", sorted(templates.FAITHFUL))
@given(chat=CHATS)
@settings(max_examples=20)
def test_control_tokens_are_the_templates_alone(tokenizer, encoders, name, chat) -> None:
    """The ids of control tokens count as if every message were harmless."""
    controls = [tokenizer.convert_tokens_to_ids(t) for t in ("<|im_start|>", "<|im_end|>")]
    harmless = [{**message, "content": "x"} for message in chat]

    def count(messages) -> list[int]:
        ids = encoders[name].encode(messages).input_ids.tolist()
        return [ids.count(control) for control in controls]

    assert count(chat) == count(harmless)


@given(chat=CHATS)
@settings(max_examples=30)
def test_last_turn_only_supervises_the_last_of_all_turns(tokenizer, encoders, chat) -> None:
    every = supervised_texts(tokenizer, encoders["plain"].encode(chat))
    last = encoders["plain"].encode(chat, supervise="last_turn_only")
    assert supervised_texts(tokenizer, last) == every[-1:]


@given(chat=CHATS)
@settings(max_examples=20)
def test_prompt_and_answer_tokens_are_those_of_serving(tokenizer, encoders, chat) -> None:
    """Tokens before an answer are the prompt that a server would be sent."""
    answer = {"role": "assistant", "content": " \n answer"}
    questions = [{**message, "role": "user"} for message in chat]
    ids = encoders["plain"].encode([*questions, answer]).input_ids.tolist()
    prompt = encoders["plain"].encode_prompt(questions).tolist()
    assert ids[: len(prompt)] == prompt
