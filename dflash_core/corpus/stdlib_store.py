"""The standard library's chats as token stores: one to train on, one held out."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from dflash_core.config import FrozenModel
from dflash_core.corpus.masking import encode_chat
from dflash_core.corpus.stdlib import Split, StdlibFunction, stdlib_functions
from dflash_core.corpus.store import Sample, TokenStore, write_store

__all__ = ["StdlibCounts", "store_stdlib"]

DOMAIN = "python-stdlib"


class StdlibCounts(FrozenModel):
    """What became of the library's functions."""

    num_functions: int
    """Functions of the split."""
    num_duplicates: int
    """Functions whose source had occurred before, in the other split too; left out."""
    num_truncated: int
    """Samples cut at max_length."""
    truncated_tokens: int
    """Tokens that the cut cost."""
    num_samples: int
    """Samples stored."""


def store_stdlib(
    path: Path,
    tokenizer: PreTrainedTokenizerFast,
    *,
    split: Split,
    max_length: int,
    max_samples: int | None = None,
    documented_only: bool = True,
) -> tuple[TokenStore, StdlibCounts]:
    """Tokenise one split of the standard library into a token store.

    Args:
        path: Store directory.
        tokenizer: Tokenizer with a chat template.
        split: Which modules.
        max_length: Longest sample in tokens; longer ones lose their end.
        max_samples: Most samples, chosen by a hash of their id; all when not given.
        documented_only: Leave out functions without a docstring.

    Returns:
        The store, and what was left out.

    Raises:
        DataError: The library's source is not there, or no sample is left.
    """
    functions = list(stdlib_functions(split, documented_only=documented_only))
    # A held-out function that some training module repeats would be a leak.
    seen = (
        {function.source for function in stdlib_functions("train", documented_only=False)}
        if split == "held_out"
        else set[str]()
    )
    unique = list(_first_of_each(functions, seen))
    chosen = _choose(unique, max_samples)
    samples = [_encode(function, tokenizer) for function in chosen]
    over = [len(sample.input_ids) - max_length for sample in samples]
    counts = StdlibCounts(
        num_functions=len(functions),
        num_duplicates=len(functions) - len(unique),
        num_truncated=sum(excess > 0 for excess in over),
        truncated_tokens=sum(excess for excess in over if excess > 0),
        num_samples=len(chosen),
    )
    kept = (_truncate(sample, max_length) for sample in samples)
    facts = {"source": "stdlib", "split": split, **counts.model_dump()}
    return write_store(path, kept, metadata=facts), counts


def _first_of_each(functions: list[StdlibFunction], seen: set[str]) -> Iterator[StdlibFunction]:
    for function in functions:
        if function.source not in seen:
            seen.add(function.source)
            yield function


def _choose(functions: list[StdlibFunction], most: int | None) -> list[StdlibFunction]:
    """Keep the functions with the smallest hashes: a choice that new functions barely disturb."""
    if most is None or len(functions) <= most:
        return functions
    ranked = sorted(
        functions, key=lambda function: hashlib.sha256(function.sample_id.encode()).digest()
    )
    return sorted(ranked[:most], key=lambda function: function.sample_id)


def _encode(function: StdlibFunction, tokenizer: PreTrainedTokenizerFast) -> Sample:
    messages = [
        {"role": "user", "content": function.prompt},
        {"role": "assistant", "content": function.source},
    ]
    input_ids, loss_mask = encode_chat(tokenizer, messages)
    return Sample(input_ids, loss_mask, domain=DOMAIN, sample_id=function.sample_id)


def _truncate(sample: Sample, most: int) -> Sample:
    return Sample(
        np.ascontiguousarray(sample.input_ids[:most]),
        np.ascontiguousarray(sample.loss_mask[:most]),
        sample.domain,
        sample.sample_id,
    )
