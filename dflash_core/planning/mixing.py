"""Which micro-batches share an optimizer step. Never depends on ranks or cost."""

import numpy as np
from numpy.typing import NDArray

from dflash_core.planning.config import Mixing

__all__ = ["StepMembers", "mix_steps"]

NEIGHBOURS = 16
StepMembers = tuple[NDArray[np.int64], NDArray[np.int64]]


def mix_steps(
    mixing: Mixing,
    *,
    num_samples: NDArray[np.int64],
    real_tokens: NDArray[np.int64],
    padded_lengths: NDArray[np.int64],
    micro_batches_per_step: int,
    rng: np.random.Generator,
) -> StepMembers:
    """Divide micro-batches into full steps and a remainder.

    Args:
        mixing: ``diverse``: each step holds the epoch's length mix; ``synchronised``: like shapes
            share a step; ``random``: chance decides.
        num_samples: Samples of each micro-batch, shape ``(num_micro_batches,)``.
        real_tokens: Real tokens of each, same shape.
        padded_lengths: Slots per row of each, same shape.
        micro_batches_per_step: Micro-batches of a full step.
        rng: Random stream of this epoch's mixing.

    Returns:
        Micro-batch indices of the full steps, shape ``(num_full, micro_batches_per_step)``, and
        of the short last step, shape ``(remainder,)``.
    """
    if mixing == "diverse":
        return _diverse(num_samples, real_tokens, micro_batches_per_step, rng)
    if mixing == "synchronised":
        return _synchronised(padded_lengths, num_samples, micro_batches_per_step, rng)
    order = rng.permutation(num_samples.size)
    num_full = num_samples.size // micro_batches_per_step
    cut = num_full * micro_batches_per_step
    return order[:cut].reshape(num_full, micro_batches_per_step), order[cut:]


def _synchronised(
    padded_lengths: NDArray[np.int64],
    num_samples: NDArray[np.int64],
    per_step: int,
    rng: np.random.Generator,
) -> StepMembers:
    order = np.lexsort((num_samples, padded_lengths))
    num_full, remainder = divmod(order.size, per_step)
    cut = int(rng.integers(0, num_full + 1)) * per_step
    short = order[cut : cut + remainder]
    full = np.concatenate([order[:cut], order[cut + remainder :]])
    return full.reshape(num_full, per_step)[rng.permutation(num_full)], short


def _diverse(
    num_samples: NDArray[np.int64],
    real_tokens: NDArray[np.int64],
    per_step: int,
    rng: np.random.Generator,
) -> StepMembers:
    """Draw each step's micro-batches from as many strata of like length.

    Strata alone leave a spread: those of short samples hold very different sample counts. So
    each stratum is dealt to the steps in order of what they lack, measured by ``tokens - mean *
    samples``; the deal is random among `NEIGHBOURS` neighbours.
    """
    num_full, remainder = divmod(num_samples.size, per_step)
    by_length = np.argsort(real_tokens * 256 // num_samples, kind="stable")
    short = np.zeros(num_samples.size, dtype=np.bool_)
    if remainder:
        stride = num_samples.size / remainder
        picks = (rng.random() * stride + stride * np.arange(remainder)).astype(np.int64)
        short[np.minimum(picks, num_samples.size - 1)] = True
    last = rng.permutation(by_length[short])
    if not num_full:
        return np.empty((0, per_step), dtype=np.int64), last
    strata = by_length[~short].reshape(per_step, num_full)
    excess = _excess(num_samples, real_tokens)
    spread = excess[strata].max(axis=1) - excess[strata].min(axis=1)
    steps = np.empty((num_full, per_step), dtype=np.int64)
    sums = np.zeros(num_full, dtype=np.int64)
    for number, stratum in enumerate(np.argsort(-spread, kind="stable").tolist()):
        members = strata[stratum]
        members = members[np.argsort(excess[members], kind="stable")]
        receivers = np.argsort(-sums, kind="stable")[_jitter(num_full, rng)]
        steps[receivers, number] = members
        sums[receivers] += excess[members]
    return steps[rng.permutation(num_full)], last


def _excess(num_samples: NDArray[np.int64], real_tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    # Tokens beyond what as many samples of mean length have; in 1/256 token where 64 bits hold it.
    total = int(real_tokens.sum())
    scale = 256 if total < 2**54 else 1
    mean = scale * total // int(num_samples.sum())
    return scale * real_tokens - mean * num_samples


def _jitter(size: int, rng: np.random.Generator) -> NDArray[np.int64]:
    order = np.arange(size)
    phase = int(rng.integers(0, NEIGHBOURS))
    return np.lexsort((rng.random(size), (order + phase) // NEIGHBOURS))
