"""Speculative decoding: the drafter proposes a block, the target verifies it in one forward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from dflash_core.decoding.cache import DecodingCache
from dflash_core.decoding.config import Sampling
from dflash_core.decoding.plain import TokenIds, left_padded, length_batches, stop_tokens
from dflash_core.decoding.sampling import accept_greedy, accept_sampled, draw, probabilities
from dflash_core.draft.model import DraftModel
from dflash_core.errors import DraftError

__all__ = ["Generation", "check_pair", "speculative_generate"]


@dataclass(frozen=True)
class Generation:
    """One decoded text.

    Attributes:
        token_ids: New tokens, a stop token included, shape ``(num_tokens,)``.
        acceptance_lengths: Tokens committed by each verification, the bonus token included; the
            first token comes from the prompt's own forward and is in none of them.
    """

    token_ids: NDArray[np.int64]
    acceptance_lengths: tuple[int, ...]


def speculative_generate(
    target: Any,
    drafter: DraftModel,
    prompts: Sequence[TokenIds],
    *,
    max_new_tokens: int,
    batch_size: int = 1,
    sampling: Sampling | None = None,
    seed: int = 0,
    stop_token_ids: Sequence[int] | None = None,
    whole_head: bool = False,
    on_round: Callable[[], None] | None = None,
) -> list[Generation]:
    """Continue prompts with the drafter's help.

    Greedy output is the target's own up to float error, sampled output is distributed as the
    target's own (speculative rejection sampling).

    Args:
        target: The target.
        drafter: Its drafter, on the same device.
        prompts: Token ids of each prompt, none empty.
        max_new_tokens: Most tokens to generate for a prompt.
        batch_size: Prompts decoded together.
        sampling: Greedy when not given.
        seed: Seed of sampling.
        stop_token_ids: Tokens that end a text; the target's own when not given.
        whole_head: Propose from all tokens, whatever the drafter was trained to propose.
        on_round: Called before each verification of a batch.

    Returns:
        One text for each prompt, in their order.

    Raises:
        DraftError: Drafter and target do not fit together.
        DataError: A prompt is empty.
    """
    check_pair(target, drafter)
    stops = stop_tokens(target) if stop_token_ids is None else tuple(stop_token_ids)
    generator = torch.Generator(target.lm_head.weight.device).manual_seed(seed)
    results: dict[int, Generation] = {}
    for rows in length_batches(prompts, batch_size):
        batch = _Batch(target, drafter, len(rows), sampling or Sampling(), generator, whole_head)
        given = [prompts[row] for row in rows]
        texts = batch.run(given, max_new_tokens, frozenset(stops), on_round)
        results.update(zip(rows, texts, strict=True))
    return [results[row] for row in range(len(prompts))]


def check_pair(target: Any, drafter: DraftModel) -> None:
    """Refuse a drafter that was made for another target.

    Raises:
        DraftError: Widths, vocabulary or layers differ.
    """
    spec, text = drafter.spec, target.model.config.get_text_config()
    rows = target.input_embeddings.weight.shape[0]
    for what, ours, theirs in (
        ("hidden size", spec.hidden_size, text.hidden_size),
        ("vocabulary", spec.vocab_size, rows),
        ("number of target layers", spec.num_target_layers, text.num_hidden_layers),
    ):
        if ours != theirs:
            raise DraftError(
                f"the drafter was made for {what} {ours:,} but the target has {theirs:,}; "
                "give the target that it was trained with"
            )


class _Batch:
    """A batch of texts in decoding; rows that end leave it."""

    def __init__(
        self,
        target: Any,
        drafter: DraftModel,
        num_rows: int,
        sampling: Sampling,
        generator: torch.Generator,
        whole_head: bool,
    ) -> None:
        self.drafter = drafter
        self.token_ids = None if whole_head else drafter.draft_token_ids
        self.sampling = sampling
        self.generator = generator
        self.cache = DecodingCache(target, num_rows, drafter)
        head_VD = target.lm_head.weight
        self.head_VD = head_VD if whole_head else drafter.head_weight(head_VD)

    @torch.inference_mode()
    def run(
        self,
        prompts: Sequence[TokenIds],
        max_new_tokens: int,
        stops: frozenset[int],
        on_round: Callable[[], None] | None,
    ) -> list[Generation]:
        """Decode the prompts to their ends."""
        ids_BT, real_BT = left_padded(prompts, self.cache.device)
        logits_B1V = self.cache.verify(ids_BT, real_BT, last=True)
        self.cache.commit(real_BT)
        first = self._choose(logits_B1V)[:, 0].tolist()
        texts = [[token] for token in first]
        rounds: list[list[int]] = [[] for _ in prompts]
        rows = list(range(len(prompts)))
        while True:
            going = [
                index
                for index, row in enumerate(rows)
                if len(texts[row]) < max_new_tokens and texts[row][-1] not in stops
            ]
            if not going:
                break
            if len(going) < len(rows):
                self.cache.select(torch.tensor(going, device=self.cache.device))
                rows = [rows[index] for index in going]
            if on_round is not None:
                on_round()
            self._round(rows, texts, rounds, max_new_tokens, stops)
        return [
            Generation(np.array(text, dtype=np.int64), tuple(lengths))
            for text, lengths in zip(texts, rounds, strict=True)
        ]

    def _round(
        self,
        rows: list[int],
        texts: list[list[int]],
        rounds: list[list[int]],
        max_new_tokens: int,
        stops: frozenset[int],
    ) -> None:
        """Draft, verify and commit one block of every row."""
        room = [max_new_tokens - len(texts[row]) for row in rows]
        width = min(self.drafter.spec.block_size, max(room) + 1)
        newest_B = torch.tensor([texts[row][-1] for row in rows], device=self.cache.device)
        drafts_BJ, draft_BJV = self._propose(newest_B, width)
        logits_BKV = self.cache.verify(torch.cat([newest_B[:, None], drafts_BJ], dim=1))
        if draft_BJV is None:
            accepted_B, bonus_B = accept_greedy(drafts_BJ, logits_BKV)
        else:
            chances_BKV = probabilities(logits_BKV, self.sampling)
            accepted_B, bonus_B = accept_sampled(drafts_BJ, chances_BKV, draft_BJV, self.generator)
        kept = []
        for row, limit, drafts, accepted, bonus in zip(
            rows, room, drafts_BJ.tolist(), accepted_B.tolist(), bonus_B.tolist(), strict=True
        ):
            tokens = [*drafts[:accepted], bonus][:limit]
            ends = [index for index, token in enumerate(tokens) if token in stops]
            tokens = tokens[: ends[0] + 1] if ends else tokens
            texts[row] += tokens
            rounds[row].append(len(tokens))
            kept.append(len(tokens))
        kept_B1 = torch.tensor(kept, device=self.cache.device)[:, None]
        self.cache.commit(torch.arange(width, device=self.cache.device) < kept_B1)

    def _propose(self, newest_B: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
        """Return drafted tokens, and their distributions over the target's vocabulary if drawn."""
        hidden_BJD = self.cache.draft(newest_B, width).to(self.head_VD.dtype)
        logits_BJV = self.drafter.scale_logits(F.linear(hidden_BJD, self.head_VD))
        ids = self.token_ids
        drafts_BJ = self._choose(logits_BJV) if self.sampling.temperature == 0 else None
        if drafts_BJ is not None:
            return (drafts_BJ if ids is None else ids[drafts_BJ]), None
        chances_BJV = probabilities(logits_BJV, self.sampling)
        if ids is not None:
            shape = (*chances_BJV.shape[:2], self.drafter.spec.vocab_size)
            full = torch.zeros(shape, device=chances_BJV.device)
            chances_BJV = full.index_copy(2, ids, chances_BJV)
        return draw(chances_BJV, self.generator), chances_BJV

    def _choose(self, logits: Tensor) -> Tensor:
        if self.sampling.temperature == 0:
            return logits.argmax(-1)
        return draw(probabilities(logits, self.sampling), self.generator)
