"""The same requests with and without a drafter, so that both meet the same machine."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_core.decoding.config import EvaluationConfig
from dflash_core.decoding.plain import generate, length_batches
from dflash_core.decoding.prompts import Prompt
from dflash_core.decoding.report import BatchTime
from dflash_core.decoding.speculative import Generation, speculative_generate
from dflash_core.draft.model import DraftModel

__all__ = ["BothSides", "decode_both"]


@dataclass
class BothSides:
    """Texts of all prompts at one batch size.

    Attributes:
        batch_size: Prompts of a full batch.
        drafted: Text of each prompt with the drafter, by index.
        plain: Text of each prompt by the target alone, by index; empty when not asked for.
        drafted_times: What each full batch took with the drafter.
        plain_times: What the same batches took without.
    """

    batch_size: int
    drafted: dict[int, Generation] = field(default_factory=dict)
    plain: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    drafted_times: list[BatchTime] = field(default_factory=list)
    plain_times: list[BatchTime] = field(default_factory=list)


def decode_both(
    target: Any,
    drafter: DraftModel,
    prompts: Sequence[Prompt],
    config: EvaluationConfig,
    batch_size: int,
    *,
    on_batch: Callable[[int], None],
    on_round: Callable[[], None] | None = None,
) -> BothSides:
    """Decode every prompt on both sides, batch by batch.

    Each side decodes a few tokens of the largest batch first, untimed. Then the sides take turns
    in every batch and in who begins, so that a change of the machine's pace meets both alike. Only
    full batches are timed: the rest at the end is no batch of that size.

    Args:
        target: The target.
        drafter: Its drafter.
        prompts: What to continue.
        config: How long, how sampled, and whether without the drafter too.
        batch_size: Prompts decoded together, no more than there are.
        on_batch: Called with the number of prompts that were just finished on both sides.
        on_round: Called before each verification of the drafter's blocks.
    """
    device = target.lm_head.weight.device
    batches = list(length_batches([prompt.token_ids for prompt in prompts], batch_size))
    found = BothSides(batch_size)

    def decode(rows: list[int], seed: int, tokens: int, *, drafts: bool) -> BatchTime:
        texts = [prompts[row].token_ids for row in rows]
        given = {"batch_size": batch_size, "sampling": config.sampling, "seed": seed}
        begin = _now(device)
        first: list[float] = []

        def listen() -> None:
            if not first:
                first.append(_now(device))
            if drafts and on_round is not None:
                on_round()

        if drafts:
            whole_head = config.served_as == "zlab"
            made = speculative_generate(
                *(target, drafter, texts),
                max_new_tokens=tokens,
                whole_head=whole_head,
                on_round=listen,
                **given,
            )
            found.drafted.update(zip(rows, made, strict=True))
            num_tokens = sum(len(text.token_ids) for text in made)
        else:
            alone = generate(target, texts, max_new_tokens=tokens, on_round=listen, **given)
            found.plain.update(zip(rows, alone, strict=True))
            num_tokens = sum(map(len, alone))
        end = _now(device)
        decoding = first[0] if first else end
        return BatchTime(num_tokens=num_tokens, prompt_s=decoding - begin, decode_s=end - decoding)

    sides = (True, False) if config.compare_plain else (True,)
    if config.compare_plain:
        few = min(config.max_new_tokens, 2 * drafter.spec.block_size)
        for drafts in sides:
            decode(batches[0], config.seed, few, drafts=drafts)
    for number, rows in enumerate(batches):
        for drafts in sides if number % 2 == 0 else sides[::-1]:
            seed = config.seed + number * batch_size
            took = decode(rows, seed, config.max_new_tokens, drafts=drafts)
            if len(rows) == batch_size:
                (found.drafted_times if drafts else found.plain_times).append(took)
        on_batch(len(rows))
    return found


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
