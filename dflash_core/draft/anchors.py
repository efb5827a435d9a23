"""Which positions of a sample become anchors, whatever it sits with."""

import hashlib

import numpy as np
from numpy.typing import NDArray

from dflash_core.planning.anchors import AnchorConfig, num_anchors

__all__ = [
    "EVERY_POSITION",
    "MOST_SUPERVISED",
    "eligible_anchors",
    "opening",
    "sample_anchors",
]

EVERY_POSITION = AnchorConfig(anchors_per_supervised_token=1.0, max_anchors=2**31)
MOST_SUPERVISED = 2048  # of a held-out sample: four times the paper's most anchors of a sample


def eligible_anchors(loss_mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the positions that are supervised and whose next token is supervised too.

    Blocks may be partial: a position qualifies however close the document's end is.

    Example:
        >>> eligible_anchors(np.array([False, True, True, True, False, True]))
        array([1, 2])
    """
    mask = np.asarray(loss_mask, dtype=np.bool_)
    return np.flatnonzero(mask[:-1] & mask[1:])


def opening(loss_mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the mask of the supervised tokens that held-out samples are measured on: the first.

    What decoding would accept is only known with an anchor wherever a block may begin. These are
    four times the default share of anchors, so with this limit measuring samples runs the drafter
    on at most about four times what training on them would.
    """
    return loss_mask & (np.cumsum(loss_mask) <= MOST_SUPERVISED)


def sample_anchors(
    loss_mask: NDArray[np.bool_],
    sample_id: str,
    *,
    seed: int,
    epoch: int,
    config: AnchorConfig,
) -> NDArray[np.int64]:
    """Draw a document's anchors: uniform without replacement over its eligible positions.

    Args:
        loss_mask: Supervised tokens of one document, shape ``(length,)``.
        sample_id: Identity of the sample; with seed and epoch the only source of chance.
        seed: Seed of the run.
        epoch: Epoch, counted from 0.
        config: How many anchors a document gets.

    Returns:
        Increasing positions; empty when nothing is eligible.
    """
    eligible = eligible_anchors(loss_mask)
    supervised = np.array([np.count_nonzero(loss_mask)])
    count = min(int(num_anchors(supervised, config)[0]), len(eligible))
    if count == len(eligible):
        return eligible
    identity = f"{seed}\x1f{epoch}\x1f{sample_id}".encode()
    digest = hashlib.blake2b(identity, digest_size=16).digest()
    rng = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    chosen = np.argsort(rng.random(len(eligible)), kind="stable")[:count]
    return eligible[np.sort(chosen)]
