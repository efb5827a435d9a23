"""Threads are what was fastest when tried, and are given back."""

import time

import pytest
import torch

from dflash_core.threads import best_threads, cpu_threads
from tests.dflash_core.draft.parts import SmallTarget


class Sleeper(torch.nn.Module):
    """A model that takes some seconds for each number of threads."""

    def __init__(self, seconds: dict[int, float]) -> None:
        super().__init__()
        self.head = torch.nn.Linear(1, 1)
        self.seconds = seconds

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, **given: object) -> None:
        time.sleep(self.seconds[torch.get_num_threads()])


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({1: 0.002, 2: 0.08, 3: 0.08}, 1),
        ({1: 0.08, 2: 0.01, 3: 0.08}, 2),
        ({1: 0.08, 2: 0.04, 3: 0.002}, 3),
    ],
    ids=["busy", "half", "idle"],
)
def test_the_fewest_threads_that_are_about_the_fastest(seconds, best) -> None:
    before = torch.get_num_threads()
    with cpu_threads(3):
        assert best_threads(SmallTarget(Sleeper(seconds))) == best
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == before
