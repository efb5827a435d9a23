"""The process group: who this rank is, and that it never outlives its launcher."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from dflash_core.errors import ConfigError, TrainingError
from dflash_core.training.config import TrainingConfig

__all__ = ["Ranks", "join_ranks"]

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Ranks:
    """This process among the others.

    Attributes:
        rank: Number of this process, from 0.
        world_size: Number of processes.
        device: Where this process computes.
        timeout_s: Longest wait for another rank.
    """

    rank: int
    world_size: int
    device: torch.device
    timeout_s: float

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files."""
        return self.rank == 0

    def add(self, tensor: Tensor, *, what: str) -> Tensor:
        """Sum a tensor over all ranks, in place.

        Args:
            tensor: Same shape on every rank.
            what: What is waited for, for the error message.

        Raises:
            TrainingError: Another rank left or did not come within the timeout.
        """
        if self.world_size > 1:
            try:
                dist.all_reduce(tensor)
            except RuntimeError as error:
                raise self._alone(what, error) from error
        return tensor

    def meet(self, *, what: str) -> None:
        """Wait until every rank is here.

        Raises:
            TrainingError: Another rank left or did not come within the timeout.
        """
        self.add(torch.zeros(1, device=self.device), what=what)

    def _alone(self, what: str, error: Exception) -> TrainingError:
        first = str(error).strip().splitlines()[0]
        return TrainingError(
            f"rank {self.rank} waited up to {self.timeout_s:g} s for the other ranks at {what} in "
            f"vain ({first}); the rank that failed first says why, or raise training.timeout_s"
        )


@contextmanager
def join_ranks(config: TrainingConfig) -> Iterator[Ranks]:
    """Join the process group that torchrun describes; a plain start is a group of one.

    Raises:
        ConfigError: torchrun started another number of ranks than the settings say.
    """
    if sys.platform == "linux":
        # torchrun gives ranks a session of their own: if it is killed, only this ends them.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != config.topology.num_ranks:
        raise ConfigError(
            f"torchrun started {world_size} ranks but training.topology.num_ranks is "
            f"{config.topology.num_ranks}; make them equal"
        )
    torch.set_num_threads(config.threads_per_rank)
    cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    rank = int(os.environ.get("RANK", "0"))
    if world_size > 1:
        timeout = timedelta(seconds=config.timeout_s)
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timeout)
    try:
        yield Ranks(rank, world_size, device, config.timeout_s)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
