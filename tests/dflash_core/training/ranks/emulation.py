"""Ranks of threads over emulated device streams and communication: the real stages and channel run.

A device has streams that run work in order, each in a thread of its own. As in ProcessGroupNCCL
(torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp), a communication operation waits for what its
caller's current stream holds, runs on a stream of its pair or group once all its ranks are there,
and holds up the caller's current stream, not the caller. Gloo's blocks the caller until all its
ranks are there. Messages between hosts are gloo's in both.
"""

import itertools
import queue
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dflash_core.training.batches.prefetch import Stage
from dflash_core.training.batches.schedule import Work, in_rounds
from dflash_core.training.features.lockstep import InStep, laid_out
from dflash_core.training.features.pipeline import Pipeline, computed, prepared
from dflash_core.training.features.transfer import Receiver, send_features
from dflash_core.training.ranks.lane import Lane

POLL_S = 0.02
FEATURES = torch.bfloat16  # tells features from credits and headers


@dataclass(frozen=True)
class Trial:
    """What is emulated.

    Attributes:
        num_targets: Target ranks.
        num_consumers: Drafter ranks.
        semantics: Of communication between devices.
        one_stream: Whether all stages launch into their device's default stream.
        sharded: Whether the target's layers are gathered from all target ranks.
        target_s: Mean seconds of a micro-batch's forward.
        draft_s: Mean seconds of its drafter's forward and backward.
    """

    num_targets: int
    num_consumers: int
    semantics: str = "nccl"
    one_stream: bool = False
    sharded: bool = False
    target_s: float = 0.001
    draft_s: float = 0.001
    wire_s: float = 0.0
    jitter: float = 0.5
    num_steps: int = 5
    per_step: int = 2
    depth: int = 2
    seed: int = 0

    def works(self) -> list[Work]:
        """Return the run's micro-batches, each holding its cost as a share of the mean."""
        rng = random.Random(self.seed)
        load = [0.0] * self.num_targets
        found = []
        for step in range(self.num_steps):
            for place in range(self.per_step * self.num_consumers):
                cost = rng.lognormvariate(-(self.jitter**2) / 2, self.jitter)
                least = min(range(self.num_targets), key=load.__getitem__)
                target = place % self.num_targets if self.sharded else least
                load[target] += cost
                number = (step << 20) + place
                found.append(Work(number, step, place % self.num_consumers, target, cost))  # type: ignore[arg-type]
        return found


class Stuck(Exception):
    """The emulated run made no progress and was ended."""


class World:
    """What ranks share: places to meet, messages, and the moment of the last progress."""

    def __init__(self) -> None:
        self.failed = threading.Event()
        self.last_progress = time.monotonic()
        self.current = threading.local()
        self._lock = threading.Lock()
        self._barriers: dict[Any, threading.Barrier] = {}
        self._messages: dict[Any, queue.SimpleQueue[Tensor]] = defaultdict(queue.SimpleQueue)

    def meet(self, key: Any, parties: int) -> None:
        with self._lock:
            barrier = self._barriers.setdefault(key, threading.Barrier(parties))
            if self.failed.is_set():
                barrier.abort()
        try:
            barrier.wait()
        except threading.BrokenBarrierError:
            raise Stuck from None
        self.last_progress = time.monotonic()

    def wait(self, event: threading.Event) -> None:
        while not event.wait(POLL_S):
            if self.failed.is_set():
                raise Stuck

    def put(self, key: Any, message: Tensor) -> None:
        with self._lock:
            box = self._messages[key]
        box.put(message.clone())

    def get(self, key: Any) -> Tensor:
        with self._lock:
            box = self._messages[key]
        while not self.failed.is_set():
            try:
                return box.get(timeout=POLL_S)
            except queue.Empty:
                continue
        raise Stuck

    def fail(self) -> None:
        with self._lock:
            self.failed.set()
            for barrier in self._barriers.values():
                barrier.abort()


class Stream:
    """Runs work in order, in a thread of its own."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self._world.failed.is_set():
            try:
                self._work.get(timeout=1.0)()
            except queue.Empty:
                continue
            except Stuck:
                return

    def launch(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def kernel(self, seconds: float) -> None:
        self.launch(lambda: time.sleep(seconds))

    def record(self) -> threading.Event:
        event = threading.Event()
        self.launch(event.set)
        return event

    def wait_for(self, event: threading.Event) -> None:
        self.launch(lambda: self._world.wait(event))

    def synchronize(self) -> None:
        self._world.wait(self.record())


class EmulatedLane(Lane):
    """A stage's queue on an emulated device."""

    def __init__(self, world: World, stream: Stream) -> None:
        self._world = world
        self._own = stream

    @contextmanager
    def in_use(self) -> Iterator[None]:
        self._world.current.stream = self._own
        yield

    def mark(self) -> threading.Event:
        return self._own.record()

    def take_over(self, mark: threading.Event | None, item: Any) -> None:
        if mark is not None:
            self._world.current.stream.wait_for(mark)


@dataclass
class EmulatedRanks:
    """One rank among the others, as the channel, the pipeline and a sharded target see it."""

    trial: Trial
    rank: int
    world: World
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeout_s: float = 600.0
    _streams: dict[Any, Stream] = field(default_factory=dict)
    _counts: dict[Any, Any] = field(default_factory=lambda: defaultdict(itertools.count))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def num_consumers(self) -> int:
        return self.trial.num_consumers

    @property
    def num_targets(self) -> int:
        return self.trial.num_targets

    def name_of(self, rank: int) -> str:
        return f"rank {rank}"

    def together(self, what: str) -> Any:
        return nullcontext()

    def stream(self, name: Any) -> Stream:
        with self._lock:
            if name not in self._streams:
                self._streams[name] = Stream(self.world)
            return self._streams[name]

    @property
    def current(self) -> Stream:
        return self.world.current.stream

    def lane(self) -> EmulatedLane:
        name = "default" if self.trial.one_stream else object()
        return EmulatedLane(self.world, self.stream(name))

    def post(self, tensor: Tensor, to: int, *, what: str) -> Callable[[], None]:
        self.world.put((self.rank, to), tensor)
        return lambda: None

    def send(self, tensor: Tensor, to: int, *, what: str) -> None:
        if tensor.dtype != FEATURES:
            self.world.put((self.rank, to), tensor)
            return
        self._communicate(("pair", self.rank, to), 2, to)

    def receive(self, tensor: Tensor, source: int, *, what: str) -> None:
        if tensor.dtype != FEATURES:
            tensor.copy_(self.world.get((source, self.rank)))
            return
        self._communicate(("pair", source, self.rank), 2, source)
        self.current.synchronize()

    def all_sharing(self, value: bool, *, what: str) -> bool:
        name = next(self._counts["sharing"])
        for other in range(self.num_targets):
            key = ("sharing", name, self.rank, other + self.num_consumers)
            self.world.put(key, torch.tensor(value))
        own = [
            self.world.get(("sharing", name, other + self.num_consumers, self.rank))
            for other in range(self.num_targets)
        ]
        return all(map(bool, own))

    def add_up(self) -> None:
        """Sum a gradient over the consuming ranks, and look at the result."""
        self.world.meet(("hosts", next(self._counts["hosts"])), self.num_consumers)
        self._communicate("consumers", self.num_consumers, "consumers")
        self.current.synchronize()

    def gather(self) -> None:
        """Gather the target's layers from the ranks that share them."""
        self._communicate("layers", self.num_targets, "layers")

    def _communicate(self, group: Any, parties: int, stream_name: Any) -> None:
        key = (group, next(self._counts[group]))
        if self.trial.semantics == "gloo":
            self.current.synchronize()
            self.world.meet(key, parties)
            return
        before, stream = self.current.record(), self.stream(("nccl", stream_name))
        stream.wait_for(before)
        stream.launch(lambda: self.world.meet(key, parties))
        stream.kernel(self.trial.wire_s)
        self.current.wait_for(stream.record())


class Batch:
    """A laid-out micro-batch of one context token."""

    context_index_M = torch.zeros(1, dtype=torch.int64)

    def to(self, device: torch.device) -> "Batch":
        return self


@dataclass
class SleepingTarget:
    """Launches a forward that takes as long as its micro-batch costs, and waits for it."""

    ranks: EmulatedRanks

    def features(self, token: Tensor, *, final_hidden: bool) -> None:
        self.ranks.gather()

    def __call__(self, cost: Any, batch: Any) -> Tensor:
        if self.ranks.trial.sharded:
            self.ranks.gather()
        self.ranks.current.kernel(self.ranks.trial.target_s * cost)
        self.ranks.current.synchronize()
        return torch.zeros(1, 1, dtype=FEATURES)


def run(trial: Trial, *, silence_s: float = 20.0) -> float:
    """Emulate a run and return its seconds.

    Raises:
        Stuck: No operation of several ranks was done for so many seconds.
    """
    world = World()
    works = trial.works()
    stuck: list[int] = []
    ranks = [EmulatedRanks(trial, r, world) for r in range(trial.num_consumers + trial.num_targets)]
    threads = [threading.Thread(target=_rank, args=(own, works, stuck)) for own in ranks]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(POLL_S)
            if time.monotonic() - world.last_progress > silence_s:
                world.fail()
    took_s = time.perf_counter() - begin
    world.failed.set()  # streams end
    if stuck:
        raise Stuck
    return took_s


def alone_s(trial: Trial) -> float:
    """Return the seconds of the slower side, if it never waited for the other."""
    works = trial.works()
    target = max(
        sum(w.micro_batch for w in works if w.target == t)  # type: ignore[misc]
        for t in range(trial.num_targets)
    )
    draft = sum(
        max(
            sum(w.micro_batch for w in works if (w.step, w.consumer) == (s, c))  # type: ignore[misc]
            for c in range(trial.num_consumers)
        )
        for s in range(trial.num_steps)
    )
    return max(target * trial.target_s, draft * trial.draft_s)


def _rank(ranks: EmulatedRanks, works: Sequence[Work], stuck: list[int]) -> None:
    ranks.world.current.stream = ranks.stream("default")
    try:
        (_consume if ranks.rank < ranks.num_consumers else _serve)(ranks, works)
    except Stuck:
        stuck.append(ranks.rank)


def _consume(ranks: EmulatedRanks, works: Sequence[Work]) -> None:
    trial = ranks.trial
    own = [work for work in works if work.consumer == ranks.rank]
    receiver = Receiver(ranks, 1, FEATURES, trial.depth)  # type: ignore[arg-type]
    pipeline = Pipeline(
        iter(own),
        lambda cost: Batch(),
        ranks,  # type: ignore[arg-type]
        depth=trial.depth,
        receiver=receiver,
    )
    for step in range(trial.num_steps):
        now = [work for work in own if work.step == step]
        for ready in pipeline.follow(now, lambda: None):
            for _ in range(2):  # a backward pass that looks at the device in between
                ranks.current.kernel(trial.draft_s * ready.work.micro_batch / 2)  # type: ignore[operator]
                ranks.current.synchronize()
        ranks.add_up()
    pipeline.close()


def _serve(ranks: EmulatedRanks, works: Sequence[Work]) -> None:
    trial, own, target = ranks.trial, ranks.rank - ranks.num_consumers, SleepingTarget(ranks)

    def stage(items: Any, name: str) -> Stage[Any]:
        return Stage(items, depth=trial.depth, name=name, lane=ranks.lane(), timeout_s=600)

    def layout(cost: Any) -> Batch:
        return Batch()

    if not trial.sharded:
        mine = (work for work in works if work.target == own)
        forward = stage(computed(prepared(mine, layout), target, ranks.device), "target")
        send_features(forward, ranks)  # type: ignore[arg-type]
        forward.close()
        return
    rounds = (
        work
        for step in range(trial.num_steps)
        for work in in_rounds([w for w in works if w.step == step], target=own)
    )
    in_step = InStep(target, ranks, final_hidden=False)  # type: ignore[arg-type]
    forward = stage(in_step.computed(laid_out(rounds, layout), target), "target")
    send_features(forward, ranks)  # type: ignore[arg-type]
    forward.close()
    in_step.finish()
