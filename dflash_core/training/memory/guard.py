"""Runs a micro-batch that may not fit: first small parts of it, which tell what the rest needs.

A CPU's OOM killer raises nothing, it ends the rank. So an eighth and a quarter are run, then the
half and the whole where what was measured so far says that they fit.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_core.errors import TrainingError
from dflash_core.throughput import fitting_budget, worst_micro_batches
from dflash_core.training.batches.types import MicroBatch
from dflash_core.training.memory.usage import memory_limit_bytes, peak_of, used_memory_bytes
from dflash_core.training.ranks.groups import Ranks

__all__ = ["MemoryGuard", "Run", "expected_growth", "parts_of"]

Run = Callable[[MicroBatch], None]
SAFE_SHARE = 0.95
GIB = 2**30
PARTS = (8, 4, 2)
SHORTEST = 8  # tokens of a part's rows: less tells nothing


class MemoryGuard:
    """Runs micro-batches within a limit.

    Args:
        device: Where they run.
        limit_bytes: What this rank may use there.
        token_budget: The budget that they were made for.

    Attributes:
        peak_bytes: Most memory in use so far.
    """

    def __init__(self, device: torch.device, *, limit_bytes: int, token_budget: int) -> None:
        self.peak_bytes = 0
        self.limit_bytes = limit_bytes
        self._device = device
        self._token_budget = token_budget

    @classmethod
    def of(cls, ranks: Ranks, *, token_budget: int) -> "MemoryGuard":
        """Return the guard of a rank among those of its machine."""
        sharing = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))
        limit = memory_limit_bytes(ranks.device, sharing=sharing)
        return cls(ranks.device, limit_bytes=limit, token_budget=token_budget)

    def run(self, micro_batch: MicroBatch, run: Run, words: str) -> None:
        """Run a micro-batch, in parts and whole.

        Args:
            micro_batch: What to run.
            run: Does with it what training will do, and leaves no trace.
            words: What it is, for the error message.

        Raises:
            TrainingError: It does not fit; says what budget would.
        """
        fixed = used_memory_bytes(self._device)
        known: list[tuple[float, int]] = []
        for part, share in parts_of(micro_batch):
            expected = expected_growth(known, share)
            # A GPU says itself when its memory is used up.
            if self._device.type == "cpu" and fixed + expected > SAFE_SHARE * self.limit_bytes:
                needed = fixed + expected_growth([*known, (share, expected)], 1.0)
                raise self._too_large(micro_batch, words, needed, fixed)
            try:
                peak = peak_of(lambda part=part: run(part), self._device)
            except (RuntimeError, MemoryError) as error:
                if not _is_out_of_memory(error):
                    raise
                # The part alone grew by more than there is.
                most = fixed + int((self.limit_bytes - fixed) / share)
                needed = max(fixed + expected_growth(known, 1.0), most)
                raise self._too_large(micro_batch, words, needed, fixed) from error
            # What stays, such as a library's buffers, is there once; the rest grows with the part.
            fixed = max(fixed, used_memory_bytes(self._device))
            known.append((share, max(peak - fixed, 0)))
            self.peak_bytes = max(self.peak_bytes, peak)

    def run_worst(
        self,
        micro_batch: Callable[[int], MicroBatch],
        run: Run,
        *,
        rows: NDArray[np.int64],
        padded_lengths: NDArray[np.int64],
        num_anchors: NDArray[np.int64],
    ) -> tuple[str, ...]:
        """Run the largest of many micro-batches and return in words which they were.

        Args:
            micro_batch: Gives one by its number.
            run: As in `run`.
            rows: Rows of each.
            padded_lengths: Token slots of each of its rows.
            num_anchors: Its anchors.

        Raises:
            TrainingError: As `run`.
        """
        told = []
        worst = worst_micro_batches(
            rows=rows, padded_lengths=padded_lengths, num_anchors=num_anchors
        )
        for index, reason in worst.items():
            words = f"{rows[index]} x {padded_lengths[index]:,} tokens, largest in {reason}"
            self.run(micro_batch(index), run, words)
            told.append(words)
        return tuple(told)

    def _too_large(
        self, micro_batch: MicroBatch, words: str, needed: int, fixed: int
    ) -> TrainingError:
        limit = self.limit_bytes
        fits = fitting_budget(
            self._token_budget,
            peak_bytes=needed,
            fixed_bytes=fixed,
            limit_bytes=int(SAFE_SHARE * limit),
        )
        if fits == 0:
            return TrainingError(
                f"models, gradients and optimizer take {fixed / GIB:.1f} GiB before the "
                f"micro-batch of {words}, and a rank may use {limit / GIB:.1f} GiB; run fewer "
                "ranks on this machine with training.topology.num_ranks, or use one with more "
                "memory"
            )
        # Packed rows are as long as the budget, whatever the samples are.
        packed = any(len(row) > 1 for row in micro_batch.rows)
        too_long = not packed and fits < micro_batch.padded_length
        also = ", and so the longest sample (corpus.max_length)" if too_long else ""
        return TrainingError(
            f"the micro-batch of {words} needs about {needed / GIB:.1f} GiB and a rank may use "
            f"{limit / GIB:.1f} GiB; set batching.token_budget to at most {fits:,}{also}"
        )


def parts_of(micro_batch: MicroBatch) -> Iterator[tuple[MicroBatch, float]]:
    """Yield ever larger parts of a micro-batch and their shares of its slots; the last is whole.

    A part has fewer rows where there are enough, and otherwise every so many-th token of each
    sample, so that a single row, packed or not, has parts too, supervised as densely.
    """
    rows, length = len(micro_batch.rows), micro_batch.padded_length
    for number in PARTS:
        if rows >= PARTS[0]:
            kept = micro_batch.rows[: rows // number]
            yield replace(micro_batch, rows=kept), len(kept) / rows
            continue
        # Rounding up may cost each document of a row a token.
        shorter = -(-length // number) + max(map(len, micro_batch.rows)) - 1
        if SHORTEST <= shorter < length:
            yield replace(micro_batch, padded_length=shorter, every=number), shorter / length
    yield micro_batch, 1.0


def expected_growth(known: list[tuple[float, int]], share: float) -> int:
    """Return the memory that a part should need, from what smaller ones did.

    One part says no more than proportion. Two tell a constant from a square, as of attention, but
    not both: the larger of the two forms through them counts.

    Args:
        known: Shares, growing, and the bytes that they needed.
        share: Share of the part.

    Example:
        >>> expected_growth([(0.25, 300), (0.5, 400)], 1.0)  # a constant of 200
        600
        >>> expected_growth([(0.25, 100), (0.5, 400)], 1.0)  # grows with the square
        1600
    """
    if not known:
        return 0
    last, needed = known[-1]
    if len(known) == 1:
        return int(needed * share / last)
    before, less = known[-2]
    slope = max(needed - less, 0) / (last - before)
    straight = needed + slope * (share - last)
    bend = (needed / last - less / before) / (last - before)
    bent = (needed / last - bend * last) * share + bend * share**2
    return int(min(max(straight, bent), needed * (share / last) ** 2))


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return "can't allocate memory" in str(error)  # of torch's allocator for CPUs
