"""How many CPU threads a model runs fastest with on this machine, as it is now.

More cores are no faster for a small model, and far slower where other work holds them: every
layer waits for its slowest thread. Ranks have ``training.threads_per_rank`` instead.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["best_threads", "cpu_threads"]

BUDGET_S = 0.5
LEAST_ROUNDS = 3
PATIENCE_S = 2.0  # for as many, where a round takes long
WORTH = 0.9  # of the time of fewer threads, or more of them are not worth it
NUM_TOKENS = 8  # about what a verification runs over


@torch.inference_mode()
def best_threads(target: Any) -> int:
    """Time small forwards of a model and return the number of CPU threads to run it with.

    Numbers of threads take turns, so that other work on the machine meets all of them. Takes half
    a second, or a round of two forwards each where that takes longer. Sums are taken in
    another order with other numbers: what is compared is to be computed with the same.

    Args:
        target: A target.

    Returns:
        1, 2, 4 and so on, up to torch's own number, which is returned on a GPU.
    """
    most, device = torch.get_num_threads(), target.lm_head.weight.device
    if most == 1 or device.type != "cpu":
        return most
    counts = sorted({most, *(2**power for power in range(most.bit_length()))})
    ids = torch.zeros(1, NUM_TOKENS, dtype=torch.long)
    took: dict[int, list[float]] = {count: [] for count in counts}
    start = time.perf_counter()
    while True:
        for count in counts:
            with cpu_threads(count):
                target.model(input_ids=ids, use_cache=False)  # starts the threads
                begin = time.perf_counter()
                target.model(input_ids=ids, use_cache=False)
                took[count].append(time.perf_counter() - begin)
        passed = time.perf_counter() - start
        if passed > (BUDGET_S if len(took[most]) >= LEAST_ROUNDS else PATIENCE_S):
            break
    best = 1
    for count in counts[1:]:
        if statistics.median(took[count]) < WORTH * statistics.median(took[best]):
            best = count
    return best


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Let torch compute with so many CPU threads in a block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
