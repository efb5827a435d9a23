from pathlib import Path

import pytest
from transformers import AutoTokenizer

from dflash_core.decoding.prompts import read_prompts
from dflash_core.errors import DataError

TARGET = Path(__file__).parents[3] / "configs" / "demo_target"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET)


def test_a_chat_ends_before_its_last_answer(tokenizer, tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bb"}]}\n'
        '{"messages": [{"role": "user", "content": "a"}]}\n'
    )
    first, second = read_prompts(file, tokenizer)
    assert first.token_ids.tolist() == second.token_ids.tolist()


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
        read_prompts(file, tokenizer)
