"""Tiny real parts for tests: a vocabulary, a random target of Qwen3 architecture, a token store."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dflash_core.corpus.stdlib import stdlib_functions
from dflash_core.corpus.vocabulary import train_vocabulary

TINY_LAYER_IDS = (0, 1, 2)
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "pad_token_id",
    "eos_token_id",
    "bos_token_id",
)


def tiny_target(path: Path, *, vocab_size: int = 384, seed: int = 0) -> Path:
    """Write a random target of Qwen3 architecture (4 layers, width 32) with its tokenizer."""
    texts = [function.source for _, function in zip(range(200), _documented(), strict=False)]
    tokenizer = train_vocabulary(texts, vocab_size=vocab_size, out=path, max_length=1024)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def tiny_family(path: Path, model_type: str, **settings: object) -> Path:
    """Write a random target of another architecture, of the same size, with the same tokenizer."""
    config = Qwen3Config.from_pretrained(tiny_target(path))
    sizes = {name: getattr(config, name) for name in SIZES}
    torch.manual_seed(0)
    made = AutoConfig.for_model(model_type, **sizes | settings)
    AutoModelForCausalLM.from_config(made).save_pretrained(path)
    return path


def _documented():
    return stdlib_functions("train")
