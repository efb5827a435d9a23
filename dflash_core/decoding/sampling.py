"""Choosing tokens, and accepting drafted ones so that the target's distribution is kept."""

import torch
from torch import Tensor

from dflash_core.decoding.config import Sampling

__all__ = ["accept_greedy", "accept_sampled", "draw", "probabilities"]


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return what is sampled from, float32, shape as the logits'; one-hot when greedy."""
    if sampling.temperature == 0:
        chosen = logits.argmax(-1, keepdim=True)
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, chosen, 1.0)
    scores = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        least = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    chances = scores.softmax(-1)
    if sampling.top_p < 1:
        ranked, order = chances.sort(dim=-1, descending=True)
        # A token stays while the mass of more likely ones is below top_p: the first always does.
        ranked = ranked * (ranked.cumsum(-1) - ranked < sampling.top_p)
        chances = torch.zeros_like(chances).scatter_(-1, order, ranked)
        chances = chances / chances.sum(-1, keepdim=True)
    return chances


def draw(chances: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw one token from each distribution over the last dimension."""
    flat = torch.multinomial(chances.flatten(0, -2), 1, generator=generator)
    return flat.view(chances.shape[:-1])


def accept_greedy(drafts_BJ: Tensor, logits_BKV: Tensor) -> tuple[Tensor, Tensor]:
    """Accept the leading drafts that are the target's own choice.

    Args:
        drafts_BJ: Drafted tokens, J = K - 1.
        logits_BKV: The target's logits after each token of the block.

    Returns:
        Accepted drafts and the bonus token, shape ``(B,)`` each.
    """
    own_BK = logits_BKV.argmax(-1)
    accepted_B = (drafts_BJ == own_BK[:, :-1]).long().cumprod(1).sum(1)
    return accepted_B, own_BK.gather(1, accepted_B[:, None])[:, 0]


def accept_sampled(
    drafts_BJ: Tensor,
    target_BKV: Tensor,
    draft_BJV: Tensor,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Accept drafts by speculative rejection sampling (arXiv 2211.17192).

    A draft is kept with probability min(1, p / q); the first one that is not is replaced by a
    draw from the positive part of p - q, so that every committed token is distributed as p.

    Args:
        drafts_BJ: Drafted tokens, drawn from ``draft_BJV``, J = K - 1.
        target_BKV: The target's distribution after each token of the block.
        draft_BJV: The drafter's distributions.
        generator: Source of chance.

    Returns:
        Accepted drafts and the token after them, shape ``(B,)`` each.
    """
    p_BJ = target_BKV[:, :-1].gather(-1, drafts_BJ[..., None])[..., 0]
    q_BJ = draft_BJV.gather(-1, drafts_BJ[..., None])[..., 0]
    chance_BJ = torch.rand(q_BJ.shape, generator=generator, device=q_BJ.device)
    accepted_B = (chance_BJ * q_BJ < p_BJ).long().cumprod(1).sum(1)
    rows_B = torch.arange(len(accepted_B), device=accepted_B.device)
    # Past the last draft there is nothing to subtract: the bonus is drawn from p itself.
    draft_BKV = torch.cat([draft_BJV, torch.zeros_like(target_BKV[:, :1])], dim=1)
    own_BV = target_BKV[rows_B, accepted_B]
    rest_BV = (own_BV - draft_BKV[rows_B, accepted_B]).clamp(min=0)
    rest_BV = torch.where(rest_BV.sum(-1, keepdim=True) > 0, rest_BV, own_BV)
    return accepted_B, draw(rest_BV, generator)
