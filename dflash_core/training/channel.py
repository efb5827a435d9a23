"""Features from target ranks to drafter ranks, with credits.

Every rank knows from the plan what comes next, so messages carry no descriptions. A drafter rank
sends a *credit*, the number of the micro-batch, for as many micro-batches as it has room for; the
target rank answers with a short header and the features. A target rank that has worked ahead
waits for the credit: that is the back-pressure. A last credit of -1 says that no more are wanted,
after the last step as after a request to stop.

It cannot deadlock. Both sides handle micro-batches in the order of the whole run. Of those not
yet handed over take the first: its drafter rank has taken all its earlier ones and has given
credit for it, its target rank has sent all its earlier ones, so it can be handed over.

Legend: M context tokens, F features.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dflash_core.training.epochs import Work
from dflash_core.training.ranks import Ranks
from dflash_core.training.stage import Stage

__all__ = ["Ready", "Receiver", "send_features"]

NO_MORE = -1
HEADER_SIZE = 3  # number, seconds of the target's forward, micro-batches it had worked ahead


@dataclass(frozen=True)
class Ready:
    """A micro-batch that can be trained on.

    Attributes:
        work: Which one.
        batch: What the objective's `prepare` made of it.
        features_MF: Captured features of its context tokens.
        target_s: Seconds that the target's forward took, wherever it ran.
        num_ahead: Micro-batches that the target rank had ready.
    """

    work: Work
    batch: Any
    features_MF: Tensor | None = None
    target_s: float = 0.0
    num_ahead: int = 0


@dataclass
class Receiver:
    """The drafter rank's end.

    Attributes:
        ranks: This process among the others.
        num_features: Width of the features.
        dtype: Their type.
        depth: Credits that are out at a time.
    """

    ranks: Ranks
    num_features: int
    dtype: torch.dtype
    depth: int
    _closing: threading.Event = field(default_factory=threading.Event)
    _credits: deque[tuple[Any, Tensor]] = field(default_factory=deque)

    def stream(self, prepared: Iterator[Ready]) -> Iterator[Ready]:
        """Yield micro-batches with their features, in order."""
        window: deque[Ready] = deque()
        more = True
        while True:
            while more and len(window) < self.depth and not self._closing.is_set():
                item = next(prepared, None)
                if item is None:
                    more = False
                else:
                    self._give_credit(item.work.target, item.work.number)
                    window.append(item)
            if not window:
                break
            yield self._receive(window.popleft())
        for target in range(self.ranks.num_targets):
            self._give_credit(target, NO_MORE)
        while self._credits:
            self._settle("the end")

    def close(self) -> None:
        """Give no more credit; what is under way still arrives."""
        self._closing.set()

    def _give_credit(self, target: int, number: int) -> None:
        credit = torch.tensor([number])
        rank = self.ranks.num_consumers + target
        with self.ranks.waiting(self.ranks.name_of(rank), "a credit"):
            handle = dist.isend(credit, rank, group=self.ranks.features)
        self._credits.append((handle, credit))

    def _settle(self, what: str) -> None:
        handle, _ = self._credits.popleft()
        with self.ranks.waiting("the target ranks", what):
            handle.wait()

    def _receive(self, item: Ready) -> Ready:
        rank = self.ranks.num_consumers + item.work.target
        what = f"the features of step {item.work.step + 1}"
        header = torch.empty(HEADER_SIZE, dtype=torch.float64)
        features_MF = torch.empty(
            len(item.batch.context_index_M),
            self.num_features,
            dtype=self.dtype,
            device=self.ranks.device,
        )
        with self.ranks.waiting(self.ranks.name_of(rank), what):
            dist.recv(header, rank, group=self.ranks.features)
            assert int(header[0]) == item.work.number, "both ends follow one plan"
            if features_MF.numel():
                dist.recv(features_MF, rank, group=self.ranks.features)
            if features_MF.is_cuda:
                torch.cuda.synchronize(features_MF.device)
        self._settle(what)
        return Ready(item.work, item.batch, features_MF, float(header[1]), int(header[2]))


def send_features(ready: Stage[Ready], ranks: Ranks) -> float:
    """Hand computed features over as credit comes, until all drafter ranks want no more.

    Args:
        ready: Micro-batches with their features, in order, worked ahead.
        ranks: This process among the others.

    Returns:
        Seconds spent waiting for credit.
    """
    wanting = set(range(ranks.num_consumers))
    waited_s = 0.0
    for item in ready:
        consumer = item.work.consumer
        if consumer not in wanting:
            continue
        what = f"the credit for step {item.work.step + 1}"
        begin = time.perf_counter()
        credit = _take_credit(consumer, ranks, what)
        waited_s += time.perf_counter() - begin
        if credit == NO_MORE:
            wanting.discard(consumer)
            if not wanting:
                return waited_s
            continue
        assert credit == item.work.number, "both ends follow one plan"
        _send(item, ready.num_waiting, ranks)
    for consumer in sorted(wanting):
        credit = _take_credit(consumer, ranks, "the end")
        assert credit == NO_MORE, "both ends follow one plan"
    return waited_s


def _take_credit(consumer: int, ranks: Ranks, what: str) -> int:
    credit = torch.empty(1, dtype=torch.int64)
    with ranks.waiting(ranks.name_of(consumer), what):
        dist.recv(credit, consumer, group=ranks.features)
    return int(credit)


def _send(item: Ready, num_ahead: int, ranks: Ranks) -> None:
    assert item.features_MF is not None
    consumer = item.work.consumer
    facts = [float(item.work.number), item.target_s, float(num_ahead)]
    what = f"the features of step {item.work.step + 1}"
    with ranks.waiting(ranks.name_of(consumer), what):
        header = torch.tensor(facts, dtype=torch.float64)
        dist.send(header, consumer, group=ranks.features)
        if item.features_MF.numel():
            dist.send(item.features_MF.contiguous(), consumer, group=ranks.features)
