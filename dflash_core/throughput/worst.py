"""Which micro-batches need the most memory, before any of them is run."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["fitting_budget", "worst_micro_batches"]


def worst_micro_batches(
    *,
    rows: NDArray[np.int64],
    padded_lengths: NDArray[np.int64],
    num_anchors: NDArray[np.int64],
) -> dict[int, str]:
    """Return the largest micro-batches and what they are largest in, by number.

    Slots drive activations, squared length attention, anchors the drafter's logits, and rows
    everything that is kept per row.

    Args:
        rows: Rows of each micro-batch.
        padded_lengths: Token slots of each of its rows.
        num_anchors: Its anchors.
    """
    found: dict[int, str] = {}
    for name, amounts in (
        ("token slots", rows * padded_lengths),
        ("squared length", rows * padded_lengths**2),
        ("anchors", num_anchors),
        ("rows", rows),
    ):
        index = int(np.argmax(amounts))
        found[index] = f"{found[index]}, {name}" if index in found else name
    return found


def fitting_budget(
    token_budget: int, *, peak_bytes: int, fixed_bytes: int, limit_bytes: int
) -> int:
    """Return the token budget whose worst micro-batch would fit.

    What grows with the budget is taken as proportional to it, which errs on the safe side while
    attention's memory does not grow with the square of the length.

    Args:
        token_budget: The budget that was tried.
        peak_bytes: Memory that its worst micro-batch needed.
        fixed_bytes: Memory that is there before: models, gradients, optimizer.
        limit_bytes: Memory that there is.

    Example:
        >>> fitting_budget(49_152, peak_bytes=100, fixed_bytes=40, limit_bytes=70)
        24576
    """
    growing = max(peak_bytes - fixed_bytes, 1)
    return max(int(token_budget * max(limit_bytes - fixed_bytes, 0) / growing), 0)
