"""Micro-batches on their way to the trainer: read ahead, with features from here or elsewhere."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from dflash_core.training.batches.prefetch import Stage
from dflash_core.training.batches.schedule import Work
from dflash_core.training.batches.types import MicroBatch
from dflash_core.training.features.lockstep import InStep
from dflash_core.training.features.source import FeatureSource, timed
from dflash_core.training.features.transfer import Ready, Receiver
from dflash_core.training.ranks.groups import Ranks

__all__ = ["Pipeline", "computed", "prepared"]


class Pipeline:
    """Gives this rank's micro-batches in the order of the plan.

    Args:
        works: What this rank consumes.
        prepare: Reads and lays out a micro-batch.
        ranks: This process among the others.
        depth: Micro-batches that may wait between two stages.
        source: Where features come from on this rank; None when another rank sends them, or
            none are needed.
        receiver: Where features come in from target ranks.
        in_step: Runs a sharded target together with the other ranks, on a rank that does.
    """

    def __init__(
        self,
        works: Iterator[Work],
        prepare: Callable[[MicroBatch], Any],
        ranks: Ranks,
        *,
        depth: int,
        source: FeatureSource | None = None,
        receiver: Receiver | None = None,
        in_step: InStep | None = None,
    ) -> None:
        self._in_step = in_step
        self._ranks = ranks
        self._source = source
        self._receiver = receiver
        self._prefetch = Stage(
            prepared(works, prepare),
            depth=depth,
            name="prefetch",
            lane=ranks.lane(),
            timeout_s=ranks.timeout_s,
        )
        self._incoming: Stage[Ready] | None = None
        self.waited_s = 0.0

    @property
    def prefetch_s(self) -> float:
        """Seconds spent reading and laying out, so far."""
        return self._prefetch.busy_s

    @property
    def num_waiting(self) -> int:
        """Prepared micro-batches that wait."""
        return self._prefetch.num_waiting

    def features_of(self, micro_batch: MicroBatch, batch: Any) -> Tensor | None:
        """Return a batch's features now, outside the order; zeros where another rank has them."""
        if self._source is not None:
            return self._source(micro_batch, batch)
        if self._receiver is None:
            return None
        size = (len(batch.context_index_M), self._receiver.num_features)
        return torch.zeros(size, dtype=self._receiver.dtype, device=self._ranks.device)

    def take(self) -> Ready:
        """Return the next micro-batch, on this rank's device."""
        begin = time.perf_counter()
        ready = next(self._last())
        self.waited_s += time.perf_counter() - begin
        batch = ready.batch
        if self._ranks.device.type == "cuda" and hasattr(batch, "to"):
            batch = batch.to(self._ranks.device)
        if self._source is None:
            return Ready(ready.work, batch, ready.features_MF, ready.target_s, ready.num_ahead)
        features_MF, seconds = timed(self._source, ready.work.micro_batch, batch)
        return Ready(ready.work, batch, features_MF, seconds)

    def follow(self, works: Iterable[Work | None], idle: Callable[[], None]) -> Iterator[Ready]:
        """Yield this rank's next micro-batches; None is a round in which it only helps others.

        Args:
            works: What the plan holds for this rank.
            idle: Helps to run what is trained, beside a sharded target.
        """
        for work in works:
            if work is None:
                if self._in_step is not None:
                    self._in_step.idle()
                idle()
                continue
            ready = self.take()
            assert ready.work.number == work.number, "the pipeline follows the plan"
            yield ready

    def abandon(self) -> None:
        """Stop reading ahead after a failure; nobody is waited for."""
        if self._receiver is None:
            self._prefetch.close(wait_s=0.0)

    def close(self) -> None:
        """Stop reading ahead and tell target ranks that no more is wanted."""
        if self._receiver is not None:
            self._receiver.close()
            for _ in self._last():  # what is under way must arrive before the end is told
                pass
        self._prefetch.close()

    def _last(self) -> Stage[Ready]:
        """Return the stage that hands micro-batches to the trainer.

        Features are waited for from the first step on, since before it target ranks load their
        model and try what they will run, which may take longer than any wait in training.
        """
        if self._receiver is None:
            return self._prefetch
        if self._incoming is None:
            self._incoming = Stage(
                self._receiver.stream(self._prefetch),
                depth=1,
                name="receive",
                lane=self._ranks.lane(),
                # So that the receiver's own sentence comes first.
                timeout_s=self._ranks.timeout_s + 5,
            )
        return self._incoming


def prepared(works: Iterator[Work], prepare: Callable[[MicroBatch], Any]) -> Iterator[Ready]:
    """Yield laid-out micro-batches."""
    for work in works:
        yield Ready(work, prepare(work.micro_batch))


def computed(
    items: Iterator[Ready], source: FeatureSource, device: torch.device
) -> Iterator[Ready]:
    """Yield micro-batches with features, on a rank that only runs the target."""
    for item in items:
        batch = item.batch.to(device) if device.type == "cuda" else item.batch
        features_MF, seconds = timed(source, item.work.micro_batch, batch)
        yield Ready(item.work, None, features_MF, seconds)
