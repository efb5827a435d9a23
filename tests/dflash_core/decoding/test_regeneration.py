"""What the target said: drawn anew for each prompt, and trained on as it was said."""

import copy

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from dflash_core.corpus.answers.regenerate import TurnPrompt
from dflash_core.corpus.config import RegenerateConfig
from dflash_core.corpus.masking.encoder import ChatEncoder
from dflash_core.corpus.vocabulary import train_vocabulary
from dflash_core.decoding.plain import generate, stop_tokens
from dflash_core.decoding.regeneration import target_generate, to_answer
from dflash_core.errors import TargetError
from tests.dflash_core.corpus.conftest import TEXTS, with_return_token
from tests.dflash_core.corpus.masking import templates
from tests.dflash_core.draft.parts import small_target

PROMPT = TurnPrompt(({"role": "user", "content": "q"},))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("tokenizer")
    return with_return_token(train_vocabulary(TEXTS, vocab_size=300, out=folder, max_length=4096))


def test_each_batch_draws_its_own_and_a_restart_the_same(tokenizer) -> None:
    target = small_target(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    target.tokenizer = tokenizer
    config = RegenerateConfig(temperature=1.0, max_new_tokens=8, batch_tokens=1)
    prompts = [TurnPrompt(PROMPT.messages, name=str(k)) for k in range(4)]
    generate = target_generate(target, config, ChatEncoder(tokenizer))
    first = generate(prompts)
    assert len({answer.content for answer in first}) == 4
    assert generate(prompts) == first
    other = generate([TurnPrompt(PROMPT.messages, name="4")])
    assert other[0] not in first, "another window repeats the draws"


def test_what_the_settings_leave_open_is_the_targets_own(tokenizer) -> None:
    """One token to choose from is greedy at any temperature, unless the settings say otherwise."""
    target = small_target(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    target.tokenizer = tokenizer
    encoder = ChatEncoder(tokenizer)
    greedy = target_generate(target, RegenerateConfig(max_new_tokens=12), encoder)([PROMPT])
    target.model.generation_config.top_k = 1
    hot = RegenerateConfig(temperature=5.0, max_new_tokens=12)
    assert target_generate(target, hot, encoder)([PROMPT]) == greedy
    free = hot.model_copy(update={"top_k": 0})
    assert target_generate(target, free, encoder)([PROMPT]) != greedy
    target.model.generation_config.repetition_penalty = 5.0
    plain = RegenerateConfig(max_new_tokens=12)
    assert target_generate(target, plain, encoder)([PROMPT]) != greedy


def test_a_thought_cut_off_is_rendered_by_the_template_of_the_tools(tokenizer) -> None:
    """Of several named templates it is `tool_use` that has the last word where tools are given."""
    named = copy.deepcopy(tokenizer)
    thinks = templates.FAITHFUL["thinks last"]
    named.chat_template = {"default": templates.PLAIN, "tool_use": thinks}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    ids = tokenizer.encode("<think>\nLet me see", add_special_tokens=False)
    for tools, thought in (((), None), ((tool,), "Let me see")):
        prompt = TurnPrompt(PROMPT.messages, tools)
        answer = to_answer(ChatEncoder(named), prompt, ids, [tokenizer.eos_token_id])
        assert answer.reasoning_content == thought


def test_every_token_that_a_file_names_ends_a_text(tokenizer) -> None:
    """A config.json of another mind than tokenizer and template let answers run on."""
    target = small_target(vocab_size=len(tokenizer), eos_token_id=[7, 9])
    target.model.generation_config.eos_token_id = 5
    target.tokenizer = copy.deepcopy(tokenizer)
    target.tokenizer.chat_template = templates.LAST_END_DIFFERS
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|return|>"])
    expected = sorted({5, 7, 9, tokenizer.eos_token_id, *ends})
    assert list(stop_tokens(target)) == expected
    nameless = small_target(eos_token_id=None)
    with pytest.raises(TargetError, match="set eos_token_id"):
        generate(nameless, [[3]], max_new_tokens=2)


def test_a_repetition_penalty_is_what_transformers_makes_of_it() -> None:
    target = small_target()
    prompts = [[5, 6, 7, 8], [9, 5]]
    settings = {"max_new_tokens": 16, "stop_token_ids": ()}
    texts = generate(target, prompts, repetition_penalty=1.5, **settings)
    for prompt, text in zip(prompts, texts, strict=True):
        theirs = target.model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            repetition_penalty=1.5,
            min_new_tokens=16,
            max_new_tokens=16,
            eos_token_id=None,
        )
        assert text.tolist() == theirs[0, len(prompt) :].tolist()
    assert texts[0].tolist() != generate(target, prompts, **settings)[0].tolist()


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
