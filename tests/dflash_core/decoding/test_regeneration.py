"""What the target said is trained on as it was said."""

import pytest
from transformers import PreTrainedTokenizerFast

from dflash_core.corpus.masking import ChatEncoder
from dflash_core.corpus.regenerate import TurnPrompt
from dflash_core.corpus.vocabulary import train_vocabulary
from dflash_core.decoding.regeneration import to_answer
from tests.dflash_core.corpus import templates
from tests.dflash_core.corpus.conftest import TEXTS, with_return_token

PROMPT = TurnPrompt(({"role": "user", "content": "q"},))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("tokenizer")
    return with_return_token(train_vocabulary(TEXTS, vocab_size=300, out=folder, max_length=4096))


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("thinks last", "<think>\nLet me see"),
        ("thinks last", "<think>\n\nanother start"),
        ("opens thought", "Let me see"),
        ("plain", "<think>\nLet me see"),
        ("plain", "no thought"),
    ],
)
def test_answer_cut_off_is_supervised_as_it_was_said(tokenizer, template, said) -> None:
    encoder = ChatEncoder(tokenizer, chat_template=templates.FAITHFUL[template])
    ids = tokenizer.encode(said, add_special_tokens=False)
    answer = to_answer(encoder, PROMPT, ids, [tokenizer.eos_token_id])
    assert (answer.finish_reason, answer.num_tokens) == ("length", len(ids))
    message = {"role": "assistant", "content": answer.content, "cut_off": True}
    if answer.reasoning_content:
        message["reasoning_content"] = answer.reasoning_content
    encoded = encoder.encode([*PROMPT.messages, message])
    assert encoder.decode(encoded.input_ids[encoded.loss_mask].tolist()) == said
    if "another" not in said:  # a thought that the template spells otherwise keeps its own text
        start = encoder.encode_prompt(PROMPT.messages).tolist()
        assert encoded.input_ids[: len(start)].tolist() == start
        assert encoded.loss_mask[len(start)]
