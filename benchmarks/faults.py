"""Kill training at random moments and see that nothing is lost.

    python benchmarks/faults.py --kills 20

For each topology a tiny run is trained once in peace, then again while single processes get
SIGKILL: a rank that trains, a rank that runs the target, the launcher, rank 0 while it writes a
checkpoint. After each kill every process must be gone soon, and the same command must go on. At the
end the loss of every step must equal the run in peace bit for bit, and the steps that ran must hold
every sample of every epoch exactly once. Takes about ten seconds a kill on two cores.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# For tests.tiny, which no install holds.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dflash_core.corpus.config import PrepareConfig
from dflash_core.corpus.preparing.prepare import prepare_store
from dflash_core.corpus.stdlib import write_stdlib_chats
from dflash_core.corpus.store import TokenStore
from dflash_core.draft.config import DraftConfig
from dflash_core.planning import plan_epoch
from dflash_core.planning.config import BatchingConfig
from dflash_core.target.config import TargetConfig
from dflash_core.training.config import TopologyConfig, TrainingConfig, TrainingJob
from tests.tiny import TINY_LAYER_IDS, tiny_target

TOPOLOGIES = ("2", "3", "1+1", "1+3")
KINDS = ("drafter", "target", "launcher", "save")
GONE_S = 45.0
POLL_S = 0.01


@dataclass
class Outcome:
    """What came of one topology's kills."""

    kills: Counter[str] = field(default_factory=Counter)
    survived: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Processes:
    """A started run."""

    launcher: "subprocess.Popen[bytes]"
    log: Path

    def ranks(self) -> dict[int, int]:
        """Return the process id of each rank that lives."""
        found = {}
        for child in children(self.launcher.pid):
            rank = rank_of(child)
            if rank is not None:
                found[rank] = child
        return found

    def wait(self) -> int | None:
        """Return the exit code, or None when the launcher does not end in time."""
        try:
            return self.launcher.wait(GONE_S)
        except subprocess.TimeoutExpired:
            return None

    def last_words(self) -> str:
        """Return the end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-12:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="for each topology")
    parser.add_argument(
        "--topologies", default=",".join(TOPOLOGIES), help="ranks, or targets+drafters"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="keep everything there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        work = arguments.work or Path(scratch)
        target, store = make_parts(work)
        failed = False
        for name in arguments.topologies.split(","):
            job = make_job(work / name, target, store, topology(name))
            outcome = try_topology(job, arguments.kills, random.Random(arguments.seed))
            failed |= bool(outcome.problems)
            report(name, outcome)
    return int(failed)


def make_parts(work: Path) -> tuple[Path, Path]:
    target = tiny_target(work / "target")
    write_stdlib_chats(work / "chats.jsonl", "held_out", most=48)
    config = PrepareConfig(max_length=192, max_reject_share=1)
    prepare_store([work / "chats.jsonl"], target, work / "store", config)
    return target, work / "store"


def topology(name: str) -> TopologyConfig:
    """Return ``"3"`` as three colocated ranks, ``"1+3"`` as one target and three drafters."""
    if "+" not in name:
        return TopologyConfig(num_ranks=int(name))
    targets, drafters = map(int, name.split("+"))
    return TopologyConfig(
        kind="disaggregated", num_ranks=targets + drafters, num_target_ranks=targets
    )


def make_job(run_dir: Path, target: Path, store: Path, ranks: TopologyConfig) -> TrainingJob:
    return TrainingJob(
        run_dir=run_dir,
        store=store,
        target=TargetConfig(path=target, layer_ids=TINY_LAYER_IDS),
        draft=DraftConfig(num_layers=1, block_size=4),
        batching=BatchingConfig(
            strategy="random", token_budget=1024, micro_batches_per_step=ranks.num_consumers
        ),
        training=TrainingConfig(
            epochs=12, checkpoint_every_steps=5, topology=ranks, timeout_s=30.0, keep_checkpoints=2
        ),
    )


def try_topology(job: TrainingJob, kills: int, rng: random.Random) -> Outcome:
    """Train in peace, then under fire until all kills are used up."""
    outcome = Outcome()
    peace = at(job, "peace")
    if not finish(peace, outcome):
        return outcome
    wanted = trace(peace)
    check_samples(peace, outcome)
    number = 0
    while sum(outcome.kills.values()) < kills and not outcome.problems:
        number += 1
        run = at(job, f"fire-{number}")
        used = Counter(fire(run, kills - sum(outcome.kills.values()), outcome, rng))
        outcome.kills += used
        if not outcome.problems and finish(run, outcome):
            check_samples(run, outcome)
            if trace(run) == wanted:
                outcome.survived += used
            else:
                outcome.problems.append(f"{run.run_dir.name}: losses differ from the run in peace")
    return outcome


def fire(job: TrainingJob, most: int, outcome: Outcome, rng: random.Random) -> Iterator[str]:
    """Start the run and kill one of its processes, again and again, until it is done."""
    kinds = [k for k in KINDS if k != "target" or job.training.topology.kind == "disaggregated"]
    for _ in range(min(most, 8)):
        kind = rng.choice(kinds)
        processes = start(job)
        hit = aim(job, processes, kind, rng)
        code = processes.wait()
        left = alive(processes, seconds=10.0)
        if code is None or left:
            outcome.problems.append(
                f"{job.run_dir.name}: after killing {kind}, processes {left or 'of torchrun'} "
                f"live on\n{processes.last_words()}"
            )
            yield kind
            return
        if not hit:
            return  # it was done before
        yield kind


def aim(job: TrainingJob, processes: Processes, kind: str, rng: random.Random) -> bool:
    """Kill at a random moment; return whether there was still something to kill."""
    moment = rng.random()
    done = len(trace(job))
    if kind == "save":
        return kill_in_save(job, processes)
    # One in five at any time of the start, the others after a random number of steps.
    if moment < 0.2:
        time.sleep(rng.uniform(0.0, 8.0))
    elif not wait_for_steps(job, processes, done + rng.randint(1, 25)):
        return False
    time.sleep(rng.uniform(0.0, 0.05))
    if kind == "launcher":
        return kill(processes.launcher.pid)
    ranks = processes.ranks()
    consumers = job.training.topology.num_consumers
    chosen = [pid for rank, pid in ranks.items() if (rank >= consumers) == (kind == "target")]
    return kill(rng.choice(chosen)) if chosen else kill(processes.launcher.pid)


def kill_in_save(job: TrainingJob, processes: Processes) -> bool:
    """Kill rank 0 as soon as it has begun to write a checkpoint."""
    folder = job.run_dir / "checkpoints"
    ranks: dict[int, int] = {}
    left_over = unfinished(folder)  # of an earlier kill
    while processes.launcher.poll() is None:
        if 0 not in ranks:
            ranks = processes.ranks()
        if unfinished(folder) - left_over:
            return 0 in ranks and kill(ranks[0])
        time.sleep(POLL_S / 10)
    return False


def unfinished(folder: Path) -> set[Path]:
    """Return checkpoints that are being written."""
    return set(folder.glob(".step*"))


def start(job: TrainingJob) -> Processes:
    job.run_dir.mkdir(parents=True, exist_ok=True)
    file = job.run_dir / "job.json"
    file.write_text(job.model_dump_json())
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={job.training.topology.num_ranks}", "--shutdown-timeout=5"),
        *("-m", "dflash_core.training", "--config", str(file)),
    ]
    log = job.run_dir / "log.txt"
    with log.open("ab") as stream:
        launcher = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
    return Processes(launcher, log)


def finish(job: TrainingJob, outcome: Outcome) -> bool:
    """Run to the end without a kill."""
    processes = start(job)
    code = processes.launcher.wait()
    if code:
        outcome.problems.append(f"{job.run_dir.name} ended with {code}\n{processes.last_words()}")
    return not code


def trace(job: TrainingJob) -> list[tuple[int, float]]:
    """Return step and loss of each line, whole lines only."""
    return [(line["step"], line["loss"]) for line in lines(job)]


def lines(job: TrainingJob) -> list[dict[str, Any]]:
    file = job.run_dir / "metrics.jsonl"
    if not file.is_file():
        return []
    return [json.loads(raw) for raw in file.read_bytes().split(b"\n")[:-1]]


def check_samples(job: TrainingJob, outcome: Outcome) -> None:
    """Hold the steps that ran, and their tokens, against the plans of all epochs."""
    store = TokenStore.open(job.store)
    ran = lines(job)
    if [line["step"] for line in ran] != list(range(1, len(ran) + 1)):
        outcome.problems.append(f"{job.run_dir.name}: a step is missing or came twice")
    for epoch in range(job.training.epochs):
        plan = plan_epoch(
            store.lengths,
            job.batching,
            epoch=epoch,
            seed=job.training.seed,
            world_size=job.training.topology.num_consumers,
            supervised=store.supervised,
        )
        tokens = [line["real_tokens"] for line in ran if line["epoch"] == epoch]
        seen: Counter[int] = Counter()
        for step in range(len(tokens)):
            placed = plan.assignment[step]
            counted = plan.loss_weight[step][placed >= 0] > 0
            for index in placed[placed >= 0][counted].tolist():
                seen.update(plan.micro_batch(index).tolist())
        planned = [int(plan.real_tokens[placed[placed >= 0]].sum()) for placed in plan.assignment]
        if tokens != planned or seen != Counter(range(len(store))):
            outcome.problems.append(
                f"{job.run_dir.name}: epoch {epoch} did not consume every sample exactly once"
            )


def wait_for_steps(job: TrainingJob, processes: Processes, steps: int) -> bool:
    while len(trace(job)) < steps:
        if processes.launcher.poll() is not None:
            return False
        time.sleep(POLL_S)
    return processes.launcher.poll() is None


def alive(processes: Processes, *, seconds: float) -> list[int]:
    """Return ranks of the run that still live after some seconds."""
    end = time.monotonic() + seconds
    marker = str(processes.log.parent / "job.json").encode()
    while True:
        left = [pid for pid in all_pids() if marker in command_of(pid)]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.1)


def kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def children(pid: int) -> list[int]:
    try:
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def rank_of(pid: int) -> int | None:
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((int(w[5:]) for w in words if w.startswith(b"RANK=")), None)


def all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def at(job: TrainingJob, name: str) -> TrainingJob:
    return job.model_copy(update={"run_dir": job.run_dir / name})


def report(name: str, outcome: Outcome) -> None:
    tried, survived = sum(outcome.kills.values()), sum(outcome.survived.values())
    by_kind = ", ".join(f"{k} {outcome.survived[k]}/{n}" for k, n in sorted(outcome.kills.items()))
    print(f"{name:>5} ranks: survived {survived}/{tried} ({by_kind})", flush=True)
    for problem in outcome.problems:
        print(f"      {problem}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
