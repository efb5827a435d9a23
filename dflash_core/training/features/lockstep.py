"""A target too large for one rank: its decoder layers are spread over the ranks that run it.

Each layer's weights are gathered just before the layer runs and freed after it (FSDP2), so what a
rank computes is what it would compute with the whole target, bit for bit. The ranks therefore run
the target equally often: micro-batches come in *rounds* that follow from the plan, at most one a
rank, and a rank without one in a round runs the target on a single token.

With features sent to other ranks this cannot deadlock either. Whatever stands in an earlier round
comes earlier in the order of the run, so when the first micro-batch that is not yet handed over is
in round ``r``, every rank has handed over its share of the rounds before and is free to enter
``r``. A rank whose drafters want no more keeps entering rounds until all ranks are there.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from dflash_core.target.config import TargetConfig
from dflash_core.target.loading import Target, load_target
from dflash_core.training.batches.schedule import Work
from dflash_core.training.features.source import FeatureSource, timed
from dflash_core.training.features.transfer import Ready
from dflash_core.training.ranks.groups import Ranks

__all__ = ["InStep", "laid_out", "load_for_ranks"]

FORWARD = "the target's next forward"


def load_for_ranks(config: TargetConfig, ranks: Ranks) -> Target:
    """Load the target as this rank runs it: whole, or its share of every decoder layer.

    Embedding, final norm and head stay whole: the drafter reads them.

    Raises:
        TargetError: As `load_target`.
    """
    if ranks.sharing is None:
        return load_target(config, device=ranks.device)
    # A target of this size is not run on the host: the flow's inspection of it has been.
    target = load_target(config, checked=False)
    mesh = DeviceMesh.from_group(ranks.sharing, ranks.device.type)
    for layer in target.decoder.layers:
        # One at a time, so that never more than one whole layer is on the device.
        fully_shard(layer.to(ranks.device), mesh=mesh, reshard_after_forward=True)
    target.model.to(ranks.device)
    return target


class InStep:
    """Runs a sharded target on this rank in step with the ranks that hold the other shares.

    Args:
        target: What `load_for_ranks` gave.
        ranks: This process among the others.
        final_hidden: Whether micro-batches run all layers; a round without one must run as many.
    """

    def __init__(self, target: Target, ranks: Ranks, *, final_hidden: bool) -> None:
        self._target = target
        self._ranks = ranks
        self._final_hidden = final_hidden

    def idle(self) -> None:
        """Take part in a round that holds nothing for this rank."""
        token = torch.zeros(1, 1, dtype=torch.int64, device=self._ranks.device)
        with self._ranks.together(FORWARD):
            self._target.features(token, final_hidden=self._final_hidden)

    def computed(self, items: Iterable[Ready | None], source: FeatureSource) -> Iterator[Ready]:
        """Yield micro-batches with features, entering every round.

        Args:
            items: What each round holds for this rank, laid out; None where it is nothing.
            source: Runs the target.
        """
        for item in items:
            self._ranks.all_sharing(False, what=FORWARD)
            if item is None:
                self.idle()
                continue
            batch = item.batch.to(self._ranks.device)
            with self._ranks.together(FORWARD):
                features_MF, seconds = timed(source, item.work.micro_batch, batch)
            yield Ready(item.work, None, features_MF, seconds)

    def finish(self) -> None:
        """Enter rounds until no rank needs this one's share any more."""
        while not self._ranks.all_sharing(True, what=FORWARD):
            self.idle()


def laid_out(works: Iterable[Work | None], layout: Callable[[Any], Any]) -> Iterator[Ready | None]:
    """Yield what each round holds for this rank, laid out on the host."""
    for work in works:
        yield None if work is None else Ready(work, layout(work.micro_batch))
