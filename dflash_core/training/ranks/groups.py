"""The process groups: who this rank is, what it does, and that it never outlives its launcher.

Ranks that consume micro-batches come first (0 writes the files), target ranks after them. Features
travel in a group of their own, apart from gradients and control.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from dflash_core.errors import ConfigError, TrainingError
from dflash_core.training.config import TopologyConfig, TrainingConfig
from dflash_core.training.ranks.lane import Lane, wait_for_device
from dflash_core.training.ranks.stop import die_with_launcher

__all__ = ["Ranks", "device_of", "join_ranks"]


@dataclass(frozen=True)
class Ranks:
    """This process among the others.

    Attributes:
        rank: Number of this process, from 0.
        world_size: Number of processes.
        num_consumers: Processes that consume micro-batches; the others run the target for them.
        device: Where this process computes.
        timeout_s: Longest wait for another rank.
        consumers: Group of the consuming ranks, None when there is one.
        everyone: Group of all ranks for control, None when there is one.
        features: Group of all ranks for features, None when colocated.
        sharing: Group of the ranks over which the target's layers are spread, None on others and
            where each rank that runs the target holds it whole.
        spread: Group of the ranks over which what is trained is spread, None on others and where
            each consuming rank holds it whole.
    """

    rank: int
    world_size: int
    num_consumers: int
    device: torch.device
    timeout_s: float
    consumers: Any = None
    everyone: Any = None
    features: Any = None
    sharing: Any = None
    spread: Any = None

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files."""
        return self.rank == 0

    @property
    def is_consumer(self) -> bool:
        """Whether this rank consumes micro-batches."""
        return self.rank < self.num_consumers

    @property
    def num_targets(self) -> int:
        """Ranks that only run the target; 0 when colocated."""
        return self.world_size - self.num_consumers

    @property
    def name(self) -> str:
        """What this rank is called in messages."""
        return self.name_of(self.rank)

    def name_of(self, rank: int) -> str:
        """Return what a rank is called in messages."""
        if not self.num_targets:
            return f"rank {rank}"
        role = "drafter" if rank < self.num_consumers else "target"
        return f"rank {rank} ({role})"

    def add(self, tensor: Tensor, *, what: str) -> Tensor:
        """Sum a tensor over the consuming ranks, in place.

        Args:
            tensor: Same shape on every consuming rank.
            what: What is waited for, for the error message.

        Raises:
            TrainingError: Another rank left or did not come within the timeout.
        """
        if self.consumers is not None:
            with self.waiting("the other ranks", what):
                dist.all_reduce(tensor, group=self.consumers)
        return tensor

    def agree(self, value: int, *, what: str) -> int:
        """Return rank 0's value on every rank.

        Raises:
            TrainingError: Another rank left or did not come within the timeout.
        """
        if self.everyone is None:
            return value
        shared = torch.tensor([value])
        with self.waiting("rank 0", what):
            dist.broadcast(shared, src=0, group=self.everyone)
        return int(shared)

    def any(self, value: bool, *, what: str) -> bool:
        """Return whether a value is true on at least one rank.

        Raises:
            TrainingError: Another rank left or did not come within the timeout.
        """
        if self.everyone is None:
            return value
        count = torch.tensor([float(value)])
        with self.waiting("the other ranks", what):
            dist.all_reduce(count, group=self.everyone)
        return bool(count)

    def meet(self, *, what: str) -> None:
        """Wait until every rank is here.

        Raises:
            TrainingError: Another rank left or did not come within the timeout.
        """
        self.any(False, what=what)

    def all_sharing(self, value: bool, *, what: str) -> bool:
        """Return whether a value is true on every rank that shares the target's layers.

        Raises:
            TrainingError: Another rank left or did not come within the timeout.
        """
        count = torch.tensor([float(value)])
        with self.waiting("the ranks that share the target", what):
            dist.all_reduce(count, group=self.sharing)
        return int(count) == dist.get_world_size(self.sharing)

    def lane(self) -> Lane:
        """Return a queue for the device work of a stage on this rank."""
        return Lane(self.device)

    def post(self, tensor: Tensor, to: int, *, what: str) -> Callable[[], None]:
        """Send a tensor on the host without waiting; return what waits until it has left.

        Raises:
            TrainingError: The other rank left; so does what is returned.
        """
        with self.waiting(self.name_of(to), what):
            # The memory must stay until the tensor has left.
            under_way = (dist.isend(tensor, to, group=self.features), tensor)

        def settle() -> None:
            handle, _ = under_way
            assert handle is not None  # only ranks outside the group have none
            with self.waiting(self.name_of(to), what):
                handle.wait()

        return settle

    def send(self, tensor: Tensor, to: int, *, what: str) -> None:
        """Send a tensor; what is launched later on this thread's lane comes after it.

        Raises:
            TrainingError: The other rank left or did not take it within the timeout.
        """
        with self.waiting(self.name_of(to), what):
            dist.send(tensor, to, group=self.features)

    def receive(self, tensor: Tensor, source: int, *, what: str) -> None:
        """Fill a tensor with what another rank sends, and wait until it is here.

        Raises:
            TrainingError: The other rank left or did not send within the timeout.
        """
        with self.waiting(self.name_of(source), what):
            dist.recv(tensor, source, group=self.features)
            wait_for_device(tensor.device)

    @contextmanager
    def first_alone(self, *, what: str) -> Iterator[Callable[[], None]]:
        """Let rank 0 work for longer than the timeout while the others wait at the block's end.

        Args:
            what: What it works on, for the log and the error message.

        Yields:
            What rank 0 calls again and again, at least once in three quarters of the timeout.

        Raises:
            TrainingError: Rank 0 left or gave no sign of life within the timeout.
        """
        last = time.monotonic()

        def heartbeat() -> None:
            nonlocal last
            if self.is_first and time.monotonic() - last >= self.timeout_s / 4:
                print(f"still at {what}", flush=True)  # noqa: T201  (torchrun's own log)
                self.agree(1, what=what)
                last = time.monotonic()

        yield heartbeat
        while self.agree(0, what=what):
            pass

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Name a lost peer where layers are gathered from ranks that share a model.

        Raises:
            TrainingError: Another rank left or did not come within the timeout.
        """
        try:
            yield
        except RuntimeError as error:
            # Anything else that goes wrong in a model is that model's own error.
            if not isinstance(error, dist.DistError) and "gloo" not in str(error):
                raise
            with self.waiting("the ranks that share a model", what):
                raise

    @contextmanager
    def waiting(self, for_whom: str, what: str) -> Iterator[None]:
        """Turn a failed wait into a sentence that says who waited for whom."""
        try:
            yield
        except RuntimeError as error:
            first = str(error).strip().splitlines()[0].split(" This is typically")[0]
            raise TrainingError(
                f"{self.name} waited up to {self.timeout_s:g} s for {for_whom} at {what} in vain "
                f"({first}); the rank that failed first says why, or raise training.timeout_s"
            ) from error


def device_of(config: TrainingConfig) -> torch.device:
    """Return where this process computes.

    Raises:
        ConfigError: That is a GPU, and there is none.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "training.device is 'cuda' but torch finds no GPU on this machine; set it to 'cpu' or "
            "leave it out"
        )
    cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", local) if cuda else torch.device("cpu")


@contextmanager
def join_ranks(config: TrainingConfig) -> Iterator[Ranks]:
    """Join the process group that torchrun describes; a plain start is a group of one.

    Raises:
        ConfigError: torchrun started another number of ranks than the settings say.
        TrainingError: Another rank did not come within the timeout.
    """
    die_with_launcher()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != config.topology.num_ranks:
        raise ConfigError(
            f"torchrun started {world_size} ranks but training.topology.num_ranks is "
            f"{config.topology.num_ranks}; make them equal"
        )
    torch.set_num_threads(config.threads_per_rank)
    # On CPUs oneDNN compiles bfloat16 kernels for each shape and keeps the last 1,024, a megabyte
    # or more each; batches of ever-changing shapes fill that and hardly meet one again.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    device = device_of(config)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    ranks = Ranks(
        rank=int(os.environ.get("RANK", "0")),
        world_size=world_size,
        num_consumers=config.topology.num_consumers,
        device=device,
        timeout_s=config.timeout_s,
    )
    if world_size == 1:
        yield ranks
        return
    timeout = timedelta(seconds=config.timeout_s)
    with ranks.waiting("the other ranks", "the start"):
        _join(ranks, "cpu:gloo,cuda:nccl" if cuda else "gloo", timeout)
    try:
        with ranks.waiting("the other ranks", "the start"):
            joined = _with_groups(ranks, timeout, config.topology)
        _connect(joined)
        yield joined
    finally:
        dist.destroy_process_group()


def _join(ranks: Ranks, backend: str, timeout: timedelta) -> None:
    # torchrun keeps one store over its restarts: without a prefix of its own, a second attempt
    # would read the addresses of the first one's dead ranks and wait for them.
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        backend,
        store=PrefixStore(f"attempt-{attempt}", store),
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timeout,
    )


def _connect(ranks: Ranks) -> None:
    """Open the way between each two ranks that will talk, in one order on all of them.

    NCCL makes a communicator, and takes its memory, when a pair first talks. Later, in the
    threads that hand features over, pairs would meet in orders that depend on chance.
    """
    what = "the start"
    token = torch.zeros(1, device=ranks.device)
    for consumer in range(ranks.num_consumers):
        for target in range(ranks.num_consumers, ranks.world_size):
            if ranks.rank == target:
                ranks.send(token, consumer, what=what)
            elif ranks.rank == consumer:
                ranks.receive(token, target, what=what)
    if ranks.is_consumer:
        ranks.add(token, what=what)


def _with_groups(ranks: Ranks, timeout: timedelta, topology: TopologyConfig) -> Ranks:
    """Make the groups, in the same order on every rank."""
    consumers = dist.new_group(list(range(ranks.num_consumers)), timeout=timeout)
    features = dist.new_group(timeout=timeout) if ranks.num_targets else None
    runners = list(range(ranks.num_consumers if ranks.num_targets else 0, ranks.world_size))
    sharing = None
    if topology.shard_target and len(runners) > 1:
        group = dist.new_group(runners, timeout=timeout)
        sharing = group if ranks.rank in runners else None
    together = consumers if ranks.num_consumers > 1 and ranks.is_consumer else None
    return replace(
        ranks,
        consumers=together,
        everyone=dist.group.WORLD,
        features=features,
        sharing=sharing,
        spread=together if topology.shard_trained else None,
    )
