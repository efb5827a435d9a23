"""One target and one drafter rank hand 128 MiB over, step by step, through the real pipeline.

Started by torchrun: ``-m tests.dflash_core.training.features.large_features cpu|cuda``.
"""

import sys
from typing import Any

import torch

from dflash_core.training.batches.prefetch import Stage
from dflash_core.training.batches.schedule import Work
from dflash_core.training.config import TopologyConfig, TrainingConfig
from dflash_core.training.features.pipeline import Pipeline, computed, prepared
from dflash_core.training.features.transfer import Receiver, send_features
from dflash_core.training.ranks.groups import join_ranks

TOKENS, WIDTH, STEPS = 16_384, 2_048, 5


class Batch:
    context_index_M = torch.zeros(TOKENS, dtype=torch.int64)

    def to(self, device: Any) -> "Batch":
        return self


def main(device: str) -> None:
    topology = TopologyConfig(kind="disaggregated", num_ranks=2, num_target_ranks=1)
    works = [Work(step, step, 0, 0, step) for step in range(STEPS)]  # type: ignore[arg-type]
    with join_ranks(TrainingConfig(topology=topology, device=device)) as ranks:  # type: ignore[arg-type]
        if ranks.is_consumer:
            receiver = Receiver(ranks, WIDTH, torch.float32, depth=2)
            pipeline = Pipeline(iter(works), lambda _: Batch(), ranks, depth=2, receiver=receiver)
            whole = 0
            for work in works:
                ready = pipeline.take()
                assert ready.features_MF is not None
                whole += int((ready.features_MF == float(work.step)).all())
                del ready  # its memory may be taken again while this device still works
                ranks.add(torch.ones(1, device=ranks.device), what="the step")
            pipeline.close()
            sys.stdout.write(f"{whole} of {STEPS} arrived whole\n")
            return

        def source(step: Any, batch: Any) -> torch.Tensor:
            return torch.full((TOKENS, WIDTH), float(step), device=ranks.device)

        items = computed(prepared(iter(works), lambda _: Batch()), source, ranks.device)  # type: ignore[arg-type]
        forward = Stage(items, depth=2, name="target", lane=ranks.lane(), timeout_s=60)
        send_features(forward, ranks)
        forward.close()


if __name__ == "__main__":
    main(sys.argv[1])
