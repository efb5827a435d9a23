"""Features from target ranks to drafter ranks, with credits.

Every rank knows from the plan what comes next, so messages carry no descriptions. A drafter rank
sends a *credit*, the number of the micro-batch, for as many micro-batches as it has room for; the
target rank answers with a short header and the features. A target rank that has worked ahead
waits for the credit: that is the back-pressure. A last credit of -1 says that no more are wanted,
after the last step as after a request to stop.

It cannot deadlock. Both sides handle micro-batches in the order of the whole run. Of those not
yet handed over take the first: its drafter rank has taken all its earlier ones and has given
credit for it, its target rank has sent all its earlier ones, so it can be handed over.

On GPUs that needs more, since a send or receive of NCCL returns at once and holds up the stream it
was called on instead. Credits and headers travel between hosts, features between devices; the
target's forward, its sends, the receiver and the trainer each have a `Lane`, so nothing but the
hand-over waits for a hand-over. A header is sent when the features exist, and only then is their
receive launched: no operation that waits for features occupies the device while they are computed.

Legend: M context tokens, F features.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dflash_core.training.batches.prefetch import Stage
from dflash_core.training.batches.schedule import Work
from dflash_core.training.ranks.groups import Ranks

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
    _credits: deque[Callable[[], None]] = field(default_factory=deque)

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
        for settle in self._credits:
            settle()

    def close(self) -> None:
        """Give no more credit; what is under way still arrives."""
        self._closing.set()

    def _give_credit(self, target: int, number: int) -> None:
        rank = self.ranks.num_consumers + target
        self._credits.append(self.ranks.post(torch.tensor([number]), rank, what="a credit"))

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
        self.ranks.receive(header, rank, what=what)
        assert int(header[0]) == item.work.number, "both ends follow one plan"
        if features_MF.numel():
            self.ranks.receive(features_MF, rank, what=what)
        self._credits.popleft()()
        return Ready(item.work, item.batch, features_MF, float(header[1]), int(header[2]))


def send_features(ready: Stage[Ready], ranks: Ranks) -> None:
    """Hand computed features over as credit comes, until all drafter ranks want no more.

    Args:
        ready: Micro-batches with their features, in order, worked ahead.
        ranks: This process among the others.
    """
    wanting = set(range(ranks.num_consumers))
    for item in ready:
        consumer = item.work.consumer
        if consumer not in wanting:
            continue
        credit = _take_credit(consumer, ranks, f"the credit for step {item.work.step + 1}")
        if credit == NO_MORE:
            wanting.discard(consumer)
            if not wanting:
                return
            continue
        assert credit == item.work.number, "both ends follow one plan"
        _send(item, ready.num_waiting, ranks)
    for consumer in sorted(wanting):
        credit = _take_credit(consumer, ranks, "the end")
        assert credit == NO_MORE, "both ends follow one plan"


def _take_credit(consumer: int, ranks: Ranks, what: str) -> int:
    credit = torch.empty(1, dtype=torch.int64)
    ranks.receive(credit, consumer, what=what)
    return int(credit)


def _send(item: Ready, num_ahead: int, ranks: Ranks) -> None:
    assert item.features_MF is not None
    consumer = item.work.consumer
    facts = [float(item.work.number), item.target_s, float(num_ahead)]
    what = f"the features of step {item.work.step + 1}"
    ranks.send(torch.tensor(facts, dtype=torch.float64), consumer, what=what)
    if item.features_MF.numel():
        ranks.send(item.features_MF.contiguous(), consumer, what=what)
