"""Handing features over holds nothing else up, whatever communication between devices waits for.

The emulation is of NCCL's semantics on a CPU; nothing here but the last test runs on a GPU.
"""

import subprocess
import sys

import pytest
import torch

from tests.dflash_core.training.ranks.emulation import Stuck, Trial, run

TOPOLOGIES = [(1, 1), (2, 2), (2, 6), (4, 4), (6, 2)]


@pytest.mark.parametrize("semantics", ["gloo", "nccl"])
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize(("targets", "drafters"), TOPOLOGIES)
def test_no_split_of_ranks_hangs(
    targets: int, drafters: int, sharded: bool, semantics: str
) -> None:
    for seed in range(3):
        run(Trial(targets, drafters, semantics=semantics, sharded=sharded, seed=seed))


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_four_nodes_do_not_hang(sharded: bool) -> None:
    run(Trial(4, 28, sharded=sharded, num_steps=3))


def test_with_one_stream_a_device_the_emulation_hangs() -> None:
    """What the lanes are there for; and that the tests above could fail."""
    hung = 0
    for seed in range(3):
        try:
            trial = Trial(6, 2, sharded=True, one_stream=True, seed=seed, num_steps=20)
            run(trial, silence_s=1.5)
        except Stuck:
            hung += 1
    assert hung


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_features_larger_than_any_eager_buffer_arrive_whole() -> None:
    program = "tests.dflash_core.training.features.large_features"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node=2", "-m", program, "cuda"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "5 of 5 arrived whole" in done.stdout
