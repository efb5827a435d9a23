"""Predicted against measured Ktok/s: every strategy trained briefly, in both topologies.

    python benchmarks/prediction.py [--steps 40] [--repeats 3] [--work DIR]

For two corpora (documented functions of the standard library; the same with a heavier tail) and
each topology the machine is calibrated, then the strategies are trained in turns, so that a
disturbance hits them all; the median over the turns counts. Prediction and measurement are of the
same steps of the same plan. Where the intervals of two strategies do not overlap, their order must
be right.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from dflash_core.corpus.stdlib_store import store_stdlib
from dflash_core.corpus.store import TokenStore, write_store
from dflash_core.draft.config import DraftConfig
from dflash_core.planning import BatchingConfig, EpochPlan, plan_epoch
from dflash_core.target.config import TargetConfig
from dflash_core.throughput import CostModel, Workload, predict, route_targets, simulate
from dflash_core.throughput.prediction import durations_of
from dflash_core.training.config import TopologyConfig, TrainingConfig, TrainingJob

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "configs" / "demo_target"
STRATEGIES = ("sorted", "random", "bucketed", "pooled")
TOPOLOGIES = {
    "colocated": TopologyConfig(num_ranks=2),
    "1+1": TopologyConfig(kind="disaggregated", num_ranks=2, num_target_ranks=1),
}
WARM_UP_STEPS = 2
BLOCK_SIZE = 8


@dataclass(frozen=True)
class Row:
    """A strategy: predicted with its interval, and what each turn measured."""

    strategy: str
    predicted: float
    low: float
    high: float
    measured: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("runs/prediction"))
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    worst = 0.0
    for corpus, store in corpora(work):
        for name, topology in TOPOLOGIES.items():
            job = make_job(work / "run", store, topology, arguments.steps)
            cost = calibrate(job, work)
            rows = [Row(s, *forecast(job, cost, s), []) for s in STRATEGIES]
            for _ in range(arguments.repeats):
                for row in rows:
                    row.measured.append(train(job, row.strategy))
            worst = max(worst, show(corpus, name, rows))
    print(f"largest error {worst:.1%}")


def corpora(work: Path) -> Iterator[tuple[str, Path]]:
    """Make the two stores: as they come, and mostly short ones with the longest of all."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    plain = work / "stdlib"
    store, _ = store_stdlib(plain, tokenizer, split="train", max_length=1024, max_samples=2500)
    yield "stdlib", plain
    ranked = np.argsort(store.lengths, kind="stable")
    short, long = ranked[: len(ranked) // 2], ranked[-len(ranked) // 12 :]
    chosen = np.sort(np.concatenate([short, long]))
    write_store(work / "heavy", (store[int(index)] for index in chosen))
    yield "heavy tail", work / "heavy"


def make_job(run_dir: Path, store: Path, topology: TopologyConfig, steps: int) -> TrainingJob:
    return TrainingJob(
        run_dir=run_dir,
        store=store,
        target=TargetConfig(path=TARGET, layer_ids=(1, 3, 5)),
        draft=DraftConfig(num_layers=2, block_size=BLOCK_SIZE),
        batching=BatchingConfig(
            token_budget=2048, micro_batches_per_step=4, num_buckets=8, pool_size=512
        ),
        training=TrainingConfig(
            epochs=1,
            max_steps=steps,
            topology=topology,
            resume=False,
            checkpoint_every_steps=10**6,
        ),
    )


def calibrate(job: TrainingJob, work: Path) -> CostModel:
    out = work / "cost.json"
    torchrun("dflash_core.training.calibration", job, "--out", str(out))
    return CostModel.model_validate_json(out.read_bytes())


def train(job: TrainingJob, strategy: str) -> float:
    """Train and return Ktok/s over the steps after warming up."""
    batching = job.batching.model_copy(update={"strategy": strategy})
    torchrun("dflash_core.training", job.model_copy(update={"batching": batching}))
    lines = [json.loads(x) for x in (job.run_dir / "metrics.jsonl").read_text().splitlines()]
    steady = lines[WARM_UP_STEPS:]
    return sum(x["real_tokens"] for x in steady) / sum(x["step_s"] for x in steady) / 1000


def torchrun(module: str, job: TrainingJob, *words: str) -> None:
    shutil.rmtree(job.run_dir, ignore_errors=True)
    job.run_dir.mkdir(parents=True)
    file = job.run_dir / "job.json"
    file.write_text(job.model_dump_json())
    ranks = f"--nproc-per-node={job.training.topology.num_ranks}"
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", ranks)
    subprocess.run(
        [*launcher, "-m", module, "--config", str(file), *words],
        check=True,
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def forecast(job: TrainingJob, cost: CostModel, strategy: str) -> tuple[float, float, float]:
    """Return Ktok/s of the very steps that will be measured, and the interval."""
    plan = plan_of(job, strategy)
    topology = job.training.topology
    work = Workload.of_plan(plan, block_size=BLOCK_SIZE)
    routes = None
    if topology.kind == "disaggregated":
        routes = route_targets(plan.assignment, plan.costs(), topology.num_target_ranks)
    durations = durations_of(work, cost, topology)
    ends = simulate(plan.assignment, durations, routes=routes, depth=topology.queue_depth).step_ends
    steps = min(job.training.max_steps or plan.num_steps, plan.num_steps)
    placed = plan.assignment[WARM_UP_STEPS:steps]
    tokens = plan.real_tokens[placed[placed >= 0]].sum()
    ktok_s = float(tokens / (ends[steps - 1] - ends[WARM_UP_STEPS - 1]) / 1000)
    whole = predict(plan, cost, block_size=BLOCK_SIZE, topology=topology, workload=work)
    return ktok_s, ktok_s * whole.low / whole.ktok_s, ktok_s * whole.high / whole.ktok_s


def plan_of(job: TrainingJob, strategy: str) -> EpochPlan:
    store = TokenStore.open(job.store)
    return plan_epoch(
        store.lengths,
        job.batching.model_copy(update={"strategy": strategy}),
        epoch=0,
        seed=job.training.seed,
        world_size=job.training.topology.num_consumers,
        supervised=store.supervised,
    )


def show(corpus: str, topology: str, rows: list[Row]) -> float:
    """Print a table and return the largest error."""
    print(f"\n{corpus}, {topology}")
    print(
        f"{'strategy':10}{'predicted':>10}{'interval':>16}{'measured':>10}{'turns':>16}{'error':>8}"
    )
    for row in rows:
        interval = f"{row.low:.2f}..{row.high:.2f}"
        turns = f"{min(row.measured):.2f}..{max(row.measured):.2f}"
        print(
            f"{row.strategy:10}{row.predicted:10.2f}{interval:>16}{row.median:10.2f}{turns:>16}"
            f"{row.predicted / row.median - 1:+8.1%}"
        )
    for a, b in combinations(rows, 2):
        apart = a.low > b.high or b.low > a.high
        if apart and (a.predicted > b.predicted) != (a.median > b.median):
            print(f"WRONG ORDER: {a.strategy} and {b.strategy}")
    return max(abs(row.predicted / row.median - 1) for row in rows)


if __name__ == "__main__":
    main()
