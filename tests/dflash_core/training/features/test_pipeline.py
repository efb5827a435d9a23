"""Micro-batches on their way to the trainer."""

import time
from types import SimpleNamespace

import torch

from dflash_core.training.config import TopologyConfig, TrainingConfig
from dflash_core.training.features.pipeline import Pipeline
from dflash_core.training.features.transfer import Receiver
from dflash_core.training.ranks.groups import join_ranks


def test_features_are_asked_for_when_training_begins_and_not_before():
    """Target ranks still load and try what they will run: waiting for them counts from step 1."""
    read = []

    def works():
        for number in range(20):
            read.append(number)
            yield SimpleNamespace(micro_batch=number, target=0, number=number)

    with join_ranks(TrainingConfig(topology=TopologyConfig(num_ranks=1))) as ranks:
        receiver = Receiver(ranks, num_features=4, dtype=torch.float32, depth=2)
        pipeline = Pipeline(works(), str, ranks, depth=3, receiver=receiver)
        for _ in range(6000):
            if len(read) == 4:
                break
            time.sleep(0.01)
        time.sleep(0.05)
        assert len(read) == 4  # three waiting, one in hand: read ahead, none asked for
        pipeline._prefetch.close()
