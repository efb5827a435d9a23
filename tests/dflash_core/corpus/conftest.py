"""A small vocabulary for the corpus tests."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from dflash_core.corpus.masking.encoder import ChatEncoder
from dflash_core.corpus.vocabulary import train_vocabulary

TEXTS = ["def answer(question):\n    return question\n", "The quick brown fox. <think> </think>"]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("tokenizer")
    return with_return_token(train_vocabulary(TEXTS, vocab_size=300, out=folder, max_length=4096))


@pytest.fixture(scope="session")
def tokenizer_folder(
    tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def encoder(tokenizer: PreTrainedTokenizerFast) -> ChatEncoder:
    return ChatEncoder(tokenizer)


def with_return_token(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|return|>"]})
    return tokenizer
