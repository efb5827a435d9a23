"""What sending features from one rank to another takes, all pairs of ranks at once."""

import statistics
import time

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from dflash_core.training.ranks.groups import Ranks
from dflash_core.training.ranks.lane import wait_for_device

__all__ = ["fit_transfer", "time_transfer"]

TOKENS = (16, 2048)
REPEATS = 7


def time_transfer(num_features: int, dtype: torch.dtype, ranks: Ranks) -> tuple[float, float]:
    """Return latency and seconds per token of sending features; zeros on one rank.

    Args:
        num_features: Values of a token's features.
        dtype: Type of a value.
        ranks: This process among the others.
    """
    peer = ranks.rank ^ 1
    seconds_RT = torch.zeros(ranks.world_size, len(TOKENS), dtype=torch.float64)
    for place, tokens in enumerate(TOKENS):
        features_MF = torch.zeros(tokens, num_features, dtype=dtype, device=ranks.device)
        times = []
        for _ in range(REPEATS):
            ranks.meet(what="timing transfers")
            begin = time.perf_counter()
            if peer < ranks.world_size:
                with ranks.waiting(ranks.name_of(peer), "timing transfers"):
                    send_first = ranks.rank % 2 == 0
                    dist.send(features_MF, peer) if send_first else dist.recv(features_MF, peer)
                wait_for_device(ranks.device)
            times.append(time.perf_counter() - begin)
        seconds_RT[ranks.rank, place] = statistics.median(times)
    every = ranks.add(seconds_RT.to(ranks.device), what="timing transfers")
    return fit_transfer(every.cpu().numpy())


def fit_transfer(seconds_RT: NDArray[np.float64]) -> tuple[float, float]:
    """Return latency and seconds per token from what few and many tokens took on each rank.

    Args:
        seconds_RT: Seconds, shape ``(num_ranks, 2)``. The last of an odd number of ranks had no
            other to talk to and does not count.
    """
    paired = seconds_RT.shape[0] // 2 * 2
    if paired == 0:
        return 0.0, 0.0
    small, large = seconds_RT[:paired].mean(axis=0).tolist()
    few, many = TOKENS
    per_token_s = max(large - small, 0.0) / (many - few)
    return max(small - few * per_token_s, 0.0), per_token_s
