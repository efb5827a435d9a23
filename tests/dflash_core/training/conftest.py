"""A tiny run: random target, a few real samples, gloo ranks when a test asks for them.

Ranks are started by torchrun where the launcher matters, and forked from the test's own process
where only the ranks do: they skip the imports, which are most of a rank's start.
"""

import contextlib
import json
import multiprocessing
import os
import random
import resource
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from dflash_core.artifacts import content_digest
from dflash_core.corpus.stdlib import stdlib_functions
from dflash_core.corpus.store import Sample, write_store
from dflash_core.draft.config import DraftConfig
from dflash_core.planning.config import BatchingConfig
from dflash_core.target.config import TargetConfig
from dflash_core.training.config import TopologyConfig, TrainingConfig, TrainingJob
from dflash_core.training.program import main, run_job
from dflash_core.training.ranks.groups import join_ranks
from dflash_core.training.ranks.stop import StopRequest
from tests.tiny import TINY_LAYER_IDS, tiny_target


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    tiny_target(folder / "target")
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    sources = [function.source for function in islice(stdlib_functions("train"), 56)]
    samples = [_sample(tokenizer(source)["input_ids"][:192], source) for source in sources]
    write_store(folder / "store", samples[:40])
    write_store(folder / "held_out", samples[40:])
    return folder


def _sample(ids: list[int], source: str) -> Sample:
    mask = np.arange(len(ids)) >= len(ids) // 3
    return Sample(np.array(ids, dtype=np.int32), mask, "stdlib", content_digest(source)[:12])


MakeJob = Callable[..., TrainingJob]


@pytest.fixture
def make_job(parts: Path, tmp_path: Path) -> MakeJob:
    def make(
        *,
        name: str = "run",
        objective: str = "draft",
        num_ranks: int = 1,
        num_target_ranks: int = 0,
        epochs: int = 2,
        strategy: str = "random",
        token_budget: int = 1024,
        micro_batches_per_step: int = 2,
        **training: object,
    ) -> TrainingJob:
        settings = {
            "objective": objective,
            "epochs": epochs,
            "checkpoint_every_steps": 3,
            "topology": TopologyConfig(
                kind="disaggregated" if num_target_ranks else "colocated",
                num_ranks=num_ranks,
                num_target_ranks=max(num_target_ranks, 1),
            ),
            "timeout_s": 120.0,
            **training,
        }
        return TrainingJob(
            run_dir=tmp_path / name,
            store=parts / "store",
            held_out_store=parts / "held_out",
            target=TargetConfig(path=parts / "target", layer_ids=TINY_LAYER_IDS),
            draft=DraftConfig(num_layers=1, block_size=4),
            batching=BatchingConfig(
                strategy=strategy,
                token_budget=token_budget,
                micro_batches_per_step=micro_batches_per_step,
            ),
            training=TrainingConfig.model_validate(settings),
        )

    return make


class FullDisk(StopRequest):
    """No file may grow beyond a few bytes during some steps; asked once in each of them."""

    def __init__(self, steps: range) -> None:
        self._steps = steps
        self._count = 0
        self._limit = resource.getrlimit(resource.RLIMIT_FSIZE)

    @property
    def asked(self) -> bool:
        self._count += 1
        full = self._count in self._steps
        soft = 20_000 if full else self._limit[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, self._limit[1]))
        return False


def run_here(job: TrainingJob) -> None:
    with join_ranks(job.training) as ranks:
        run_job(job, ranks)


def write_job(job: TrainingJob) -> Path:
    job.run_dir.mkdir(parents=True, exist_ok=True)
    file = job.run_dir / "job.json"
    file.write_text(job.model_dump_json())
    return file


def start_ranks(job: TrainingJob, *options: str) -> "subprocess.Popen[str]":
    """Start a job under torchrun."""
    ranks = job.training.topology.num_ranks
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", *options),
        *(f"--nproc-per-node={ranks}", "--shutdown-timeout=60"),
        *("-m", "dflash_core.training", "--config", str(write_job(job))),
    ]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )


def fork_ranks(job: TrainingJob, *options: str) -> list[multiprocessing.Process]:
    """Start a job's ranks as forks of this process."""
    file = write_job(job)
    num_ranks = job.training.topology.num_ranks
    port = free_port()
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_be_rank, args=(file, rank, num_ranks, port, options))
        for rank in range(num_ranks)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of forks beside threads
        for process in processes:
            process.start()
    return processes  # pyright: ignore[reportReturnType]


def free_port() -> int:
    """Return a free port below those that the kernel gives to whoever names none."""
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def finish(processes: list[multiprocessing.Process], *, timeout_s: float = 240) -> list[int | None]:
    """Wait for ranks and return their exit codes."""
    end = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(end - time.monotonic(), 0))
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.kill()
    assert not alive, "ranks hang"
    return [process.exitcode for process in processes]


def run_ranks(job: TrainingJob, *options: str) -> list[int | None]:
    """Run a job on forked ranks to its end."""
    return finish(fork_ranks(job, *options))


def _be_rank(file: Path, rank: int, num_ranks: int, port: int, options: tuple[str, ...]) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    log = os.open(file.parent / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.stderr = os.fdopen(log, "w", buffering=1)
    os._exit(main(["--config", str(file), *options], stop=StopRequest().listen()))


def read_steps(job: TrainingJob) -> list[dict]:
    lines = (job.run_dir / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    return steps


def losses(job: TrainingJob) -> list[float]:
    return [step["loss"] for step in read_steps(job)]


def status(job: TrainingJob) -> dict[str, object]:
    return json.loads((job.run_dir / "status.json").read_text())


def wait_for_step(job: TrainingJob, step: int) -> None:
    file = job.run_dir / "metrics.jsonl"
    for _ in range(4800):
        if file.is_file() and len(file.read_text().splitlines()) >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} never came")


def children_of(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
