"""Predicted against measured Ktok/s: every strategy trained briefly, in both topologies.

    python benchmarks/prediction.py [--turns 6] [--rounds 2] [--steps 12] [--only demo/1+1]

For two corpora (that of `configs/demo.toml`, and one with a heavier tail) and each topology, in
turns: the machine is calibrated, then every strategy is predicted and trained by the training
program for a few steps, round after round with other seeds, so that the machine's changes of pace
hit them all. Prediction and measurement are of the same steps of the same plan; the error is the
median over all rounds, and `among` is what is left of it when the strategies' median error, which
is the machine's change of pace since the calibration, is taken out. Where the intervals of two
strategies do not overlap, their order must be right; it exits with 1 where one is not.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from configs.settings import Settings, load_settings
from dflash_core.calibration.history import balanced
from dflash_core.corpus.config import PrepareConfig
from dflash_core.corpus.preparing.prepare import prepare_store
from dflash_core.corpus.stdlib import write_stdlib_chats
from dflash_core.corpus.store import TokenStore, write_store
from dflash_core.planning import EpochPlan, plan_epoch
from dflash_core.throughput import CostModel, Workload, predict
from dflash_core.throughput.prediction import timeline_of
from dflash_core.training.config import TopologyConfig, TrainingJob
from dflash_core.training.program import run_job
from dflash_core.training.ranks.groups import join_ranks

ROOT = Path(__file__).resolve().parents[1]
STRATEGIES = ("sorted", "random", "bucketed", "pooled", "packed")
CORPORA = ("demo", "heavy")
TOPOLOGIES = {
    "colocated": TopologyConfig(num_ranks=2),
    "1+1": TopologyConfig(kind="disaggregated", num_ranks=2, num_target_ranks=1),
}
HEAVY_LENGTH = 1024
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Forecast:
    """Ktok/s of the steps that are measured, with its interval."""

    ktok_s: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """A strategy: what each round predicted and measured."""

    strategy: str
    forecasts: list[Forecast]
    measured: list[float]

    @property
    def predicted(self) -> float:
        return statistics.median(one.ktok_s for one in self.forecasts)

    @property
    def low(self) -> float:
        return statistics.median(one.low for one in self.forecasts)

    @property
    def high(self) -> float:
        return statistics.median(one.high for one in self.forecasts)

    @property
    def median(self) -> float:
        return statistics.median(self.measured)

    @property
    def error(self) -> float:
        """Median over rounds of each one's own."""
        pairs = zip(self.forecasts, self.measured, strict=True)
        return statistics.median(one.ktok_s / measured for one, measured in pairs) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=6, help="calibrations")
    parser.add_argument("--rounds", type=int, default=2, help="short runs after each")
    parser.add_argument("--steps", type=int, default=12, help="of each run")
    parser.add_argument("--only", choices=[f"{c}/{t}" for c in CORPORA for t in TOPOLOGIES])
    parser.add_argument("--work", type=Path, default=Path("runs/prediction"))
    parser.add_argument("--ranks", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ranks is not None:
        train_on_this_rank(arguments.ranks)
        return
    work = arguments.work.resolve()
    errors, wrong = [], 0
    for corpus in CORPORA:
        for topology in TOPOLOGIES:
            if arguments.only in (None, f"{corpus}/{topology}"):
                job = make_job(corpus, topology, work, arguments.steps)
                rows = compare(job, arguments.turns, arguments.rounds)
                wrong += show(f"{corpus}, {topology}", rows)
                errors += [abs(row.error) for row in rows]
    print(f"\nerror: median {statistics.median(errors):.1%}, largest {max(errors):.1%}")
    sys.exit(bool(wrong))


def make_job(corpus: str, topology: str, work: Path, steps: int) -> TrainingJob:
    settings = load_settings(ROOT / "configs" / "demo.toml")
    store = work / corpus
    if not store.exists():
        make_store(corpus, settings, store)
    limits = {} if corpus == "demo" else {"token_budget": HEAVY_LENGTH}
    training = {
        "epochs": 1,
        "max_steps": steps,
        "topology": TOPOLOGIES[topology],
        "resume": False,
        "checkpoint_every_steps": 10**6,
    }
    return TrainingJob(
        run_dir=work / f"{corpus}-{topology}",
        store=store,
        target=settings.target,
        draft=settings.draft,
        loss=settings.loss,
        batching=settings.batching.model_copy(update=limits),
        training=settings.training.model_copy(update=training),
    )


def make_store(corpus: str, settings: Settings, path: Path) -> None:
    """Store the demo's samples, or mostly short ones beside the longest of all."""
    chats, whole = path.with_name("chats.jsonl"), path.with_name("whole")
    demo = corpus == "demo"
    write_stdlib_chats(chats, "train", most=settings.corpus.max_samples if demo else None)
    config = PrepareConfig(max_length=settings.corpus.max_length if demo else HEAVY_LENGTH)
    prepare_store([chats], settings.target.path, path if demo else whole, config)
    if demo:
        return
    store = TokenStore.open(whole)
    ranked = np.argsort(store.lengths, kind="stable")
    short, long = ranked[: len(ranked) // 2], ranked[-len(ranked) // 12 :]
    chosen = np.sort(np.concatenate([short, long]))
    write_store(path, (store[int(index)] for index in chosen))


def compare(job: TrainingJob, turns: int, rounds: int) -> list[Row]:
    """Calibrate, predict every strategy and train it, in turns."""
    shutil.rmtree(job.run_dir, ignore_errors=True)
    job.run_dir.mkdir(parents=True)
    rows = [Row(name, [], []) for name in STRATEGIES]
    for turn in range(turns):
        begin = time.perf_counter()
        cost = calibrate(job)
        print(f"calibrated in {time.perf_counter() - begin:.0f} s, {cost.correction=:.3f}")
        even = balanced(job, cost, TokenStore.open(job.store).lengths)
        numbers = range(turn * rounds, (turn + 1) * rounds)
        pairs = [(row, with_strategy(even, row.strategy, n)) for n in numbers for row in rows]
        file = job.run_dir / "jobs.json"
        file.write_text(json.dumps([json.loads(one.model_dump_json()) for _, one in pairs]))
        torchrun(job, str(Path(__file__)), "--ranks", str(file))
        for row, one in pairs:
            row.forecasts.append(forecast(one, cost))
            row.measured.append(measured(one.run_dir))
    return rows


def with_strategy(job: TrainingJob, name: str, number: int) -> TrainingJob:
    changes = {
        "batching": job.batching.model_copy(update={"strategy": name}),
        "training": job.training.model_copy(update={"seed": number}),
        "run_dir": job.run_dir / f"{name}-{number}",
    }
    return job.model_copy(update=changes)


def calibrate(job: TrainingJob) -> CostModel:
    file, out = job.run_dir / "job.json", job.run_dir / "cost.json"
    file.write_text(job.model_dump_json())
    words = ("--config", str(file), "--out", str(out))
    torchrun(job, "-m", "dflash_core.calibration.program", *words)
    return CostModel.model_validate_json(out.read_bytes())


def torchrun(job: TrainingJob, *words: str) -> None:
    ranks = f"--nproc-per-node={job.training.topology.num_ranks}"
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", ranks)
    with (job.run_dir / "log.txt").open("a") as log:
        subprocess.run(
            [*launcher, *words],
            check=True,
            stdout=log,
            stderr=log,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )


def train_on_this_rank(file: Path) -> None:
    jobs = [TrainingJob.model_validate(job) for job in json.loads(file.read_text())]
    with join_ranks(jobs[0].training) as ranks:
        for job in jobs:
            job.run_dir.mkdir(exist_ok=True)
            run_job(job, ranks)


def measured(run_dir: Path) -> float:
    """Return Ktok/s over the steps after warming up."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steady = lines[WARM_UP_STEPS:]
    return sum(x["real_tokens"] for x in steady) / sum(x["step_s"] for x in steady) / 1000


def forecast(job: TrainingJob, cost: CostModel) -> Forecast:
    """Predict the very steps that will be measured."""
    plan, topology, block_size = plan_of(job), job.training.topology, job.draft.block_size
    work = Workload.of_plan(plan, block_size=block_size)
    whole = predict(plan, cost, block_size=block_size, topology=topology, workload=work)
    ends = timeline_of(plan, work, cost, topology).step_ends
    steps = min(job.training.max_steps or plan.num_steps, plan.num_steps)
    placed = plan.assignment[WARM_UP_STEPS:steps]
    seconds = float(ends[steps - 1] - ends[WARM_UP_STEPS - 1])
    ktok_s = int(plan.real_tokens[placed[placed >= 0]].sum()) / seconds / 1000
    scale = ktok_s / whole.ktok_s
    return Forecast(ktok_s, scale * whole.low, scale * whole.high)


def plan_of(job: TrainingJob) -> EpochPlan:
    store = TokenStore.open(job.store)
    return plan_epoch(
        store.lengths,
        job.batching,
        epoch=0,
        seed=job.training.seed,
        world_size=job.training.topology.num_consumers,
        supervised=store.supervised,
        cost=job.consumer_cost,
    )


def show(title: str, rows: list[Row]) -> int:
    """Print the table; return how many pairs came in another order than was sure."""
    print(f"\n{title}")
    headings = f"{'predicted':>10}{'interval':>16}{'measured':>10}{'quartiles':>16}{'error':>8}"
    print(f"{'strategy':10}{headings}{'among':>8}")
    pace = 1 + statistics.median(row.error for row in rows)
    for row in rows:
        interval = f"{row.low:.2f}..{row.high:.2f}"
        low, high = np.quantile(row.measured, (0.25, 0.75))
        middle = f"{low:.2f}..{high:.2f}"
        print(
            f"{row.strategy:10}{row.predicted:10.2f}{interval:>16}{row.median:10.2f}{middle:>16}"
            f"{row.error:+8.1%}{(1 + row.error) / pace - 1:+8.1%}",
            flush=True,
        )
    wrong = 0
    for a, b in combinations(rows, 2):
        apart = a.low > b.high or b.low > a.high
        if apart and (a.predicted > b.predicted) != (a.median > b.median):
            print(f"WRONG ORDER: {a.strategy} and {b.strategy}")
            wrong += 1
    return wrong


if __name__ == "__main__":
    main()
