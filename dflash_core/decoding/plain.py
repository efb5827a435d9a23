"""Plain decoding by the target alone: regenerates answers, and is what drafting is held against."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_core.corpus.masking.encoder import ChatEncoder
from dflash_core.corpus.masking.loading import own_encoder
from dflash_core.decoding.cache import DecodingCache, takes_padding
from dflash_core.decoding.config import Sampling
from dflash_core.decoding.sampling import draw, probabilities
from dflash_core.errors import DataError, TargetError

__all__ = ["generate", "left_padded", "length_batches", "stop_tokens"]

TokenIds = NDArray[np.integer] | Sequence[int]


def generate(
    target: Any,
    prompts: Sequence[TokenIds],
    *,
    max_new_tokens: int,
    batch_size: int = 32,
    sampling: Sampling | None = None,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    stop_token_ids: Sequence[int] | None = None,
    on_batch: Callable[[int], None] | None = None,
    on_round: Callable[[], None] | None = None,
) -> list[NDArray[np.int64]]:
    """Continue prompts, in batches of like length, with a key-value cache.

    Args:
        target: The target.
        prompts: Token ids of each prompt, none empty.
        max_new_tokens: Most tokens to generate for a prompt.
        batch_size: Prompts decoded together.
        sampling: Greedy when not given.
        repetition_penalty: Positive logits of tokens of the text are divided by it, negative ones
            multiplied (arXiv 1909.05858, as transformers does it: the prompt's tokens, too).
        seed: Seed of sampling.
        stop_token_ids: Tokens that end a text; the target's own when not given.
        on_batch: Called after each batch with the number of prompts it finished.
        on_round: Called before each forward of a batch but that of its prompts.

    Returns:
        New tokens of each prompt, in the prompts' order, a stop token included.

    Raises:
        DataError: A prompt is empty.
        TargetError: Nothing says which token ends a text, or the target's cache is its own kind.
    """
    stops = stop_tokens(target) if stop_token_ids is None else tuple(stop_token_ids)
    results: list[NDArray[np.int64]] = [np.zeros(0, dtype=np.int64) for _ in prompts]
    device = target.lm_head.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    for rows in length_batches(prompts, batch_size, alike=not takes_padding(target)):
        texts = _generate_batch(
            target,
            [prompts[row] for row in rows],
            max_new_tokens,
            sampling or Sampling(),
            repetition_penalty,
            torch.tensor(stops, device=device, dtype=torch.long),
            generator,
            on_round,
        )
        for row, text in zip(rows, texts, strict=True):
            results[row] = text
        if on_batch is not None:
            on_batch(len(rows))
    return results


def stop_tokens(target: Any, encoder: ChatEncoder | None = None) -> tuple[int, ...]:
    """Return the tokens that end the target's texts: any that one of its files names.

    A base model's generation_config.json under a chat template, or a config.json that its
    tokenizer contradicts, would have answers run on behind their end.

    Args:
        target: The target.
        encoder: Of the chats; with the tokenizer's own template when not given.

    Raises:
        TargetError: No file names one.
    """
    model, tokenizer = target.model, target.tokenizer
    found: set[int] = set()
    for source in (
        model.generation_config,
        model.config,
        model.config.get_text_config(),
        tokenizer,
    ):
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    if encoder is None and getattr(tokenizer, "chat_template", None):
        encoder = own_encoder(tokenizer)
    found.update(encoder.end_token_ids if encoder is not None else ())
    if not found:
        raise TargetError(
            f"neither config.json, generation_config.json, tokenizer nor chat template of this "
            f"{type(model).__name__} name a token that ends a text; set eos_token_id in the "
            "target's generation_config.json"
        )
    return tuple(sorted(map(int, found)))


def length_batches(
    prompts: Sequence[TokenIds], batch_size: int, *, alike: bool = False
) -> Iterator[list[int]]:
    """Yield rows of prompts of like length, longest first, so that what is too large fails first.

    Args:
        prompts: Token ids of each prompt.
        batch_size: Most rows at a time.
        alike: Rows of one length only: for targets whose states take no padding.

    Raises:
        DataError: A prompt is empty.
    """
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise DataError(f"prompt {row} is empty: there is no token to continue")
    order = sorted(range(len(prompts)), key=lambda row: -len(prompts[row]))
    for _, group in groupby(order, key=lambda row: len(prompts[row]) if alike else 0):
        rows = list(group)
        for start in range(0, len(rows), batch_size):
            yield rows[start : start + batch_size]


def left_padded(prompts: Sequence[TokenIds], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return prompts as one array with padding before them, and where it is real."""
    width = max(len(prompt) for prompt in prompts)
    ids = np.zeros((len(prompts), width), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
    lengths = np.array([len(prompt) for prompt in prompts])
    real = np.arange(width) >= width - lengths[:, None]
    return torch.from_numpy(ids).to(device), torch.from_numpy(real).to(device)


@torch.inference_mode()
def _generate_batch(
    target: Any,
    prompts: Sequence[TokenIds],
    max_new_tokens: int,
    sampling: Sampling,
    repetition_penalty: float,
    stops: Tensor,
    generator: torch.Generator,
    on_round: Callable[[], None] | None,
) -> list[NDArray[np.int64]]:
    cache = DecodingCache(target, len(prompts))
    ids_BT, real_BT = left_padded(prompts, cache.device)
    logits_BV = cache.verify(ids_BT, real_BT, last=True)[:, -1]
    cache.commit(real_BT)
    said_RV = torch.zeros_like(logits_BV, dtype=torch.bool)
    said_RV[real_BT.nonzero()[:, 0], ids_BT[real_BT]] = True
    texts_BT = torch.zeros(len(prompts), max_new_tokens, dtype=torch.long, device=cache.device)
    lengths = np.full(len(prompts), max_new_tokens)
    rows_R = torch.arange(len(prompts), device=cache.device)
    for step in range(max_new_tokens):
        if repetition_penalty != 1:
            rarer_RV = torch.where(
                logits_BV > 0, logits_BV / repetition_penalty, logits_BV * repetition_penalty
            )
            logits_BV = torch.where(said_RV, rarer_RV, logits_BV)
        if sampling.temperature == 0:
            tokens_R = logits_BV.argmax(-1)
        else:
            tokens_R = draw(probabilities(logits_BV, sampling), generator)
        texts_BT[rows_R, step] = tokens_R
        said_RV.scatter_(1, tokens_R[:, None], True)
        running_R = ~torch.isin(tokens_R, stops)
        lengths[rows_R[~running_R].cpu().numpy()] = step + 1
        if not running_R.any() or step + 1 == max_new_tokens:
            break
        if not running_R.all():
            # At once, as with a drafter: else the end of a batch costs the one side more.
            cache.select(running_R)
            tokens_R, rows_R = tokens_R[running_R], rows_R[running_R]
            said_RV = said_RV[running_R]
        if on_round is not None:
            on_round()
        logits_BV = cache.verify(tokens_R[:, None])[:, -1]
        cache.commit(torch.ones_like(tokens_R[:, None], dtype=torch.bool))
    texts = texts_BT.cpu().numpy()
    return [text[:length] for text, length in zip(texts, lengths, strict=True)]
