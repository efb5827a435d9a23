"""Does target work hide behind drafter work? Wall time per step against the slower side alone.

    python benchmarks/pipeline.py

With sleeps: the real plan, prefetch, credits, sends and reductions, but the target's forward and
the drafter's step are sleeps of known length, so the slower side alone is known exactly and any
number of processes fits on two cores. With models: the whole program, the demo target and a
drafter, two processes; the slower side alone is the busy time of its ranks in the same run.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# For tests.tiny, which no install holds.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import Tensor

from dflash_core.config import FrozenModel
from dflash_core.corpus.config import PrepareConfig
from dflash_core.corpus.preparing.prepare import prepare_store
from dflash_core.corpus.stdlib import write_stdlib_chats
from dflash_core.corpus.store import TokenStore
from dflash_core.draft.batch import DraftBatch
from dflash_core.draft.config import DraftConfig
from dflash_core.planning.config import BatchingConfig
from dflash_core.target.config import TargetConfig
from dflash_core.training.batches.prefetch import Stage
from dflash_core.training.batches.schedule import Epochs
from dflash_core.training.batches.types import MicroBatch
from dflash_core.training.config import TopologyConfig, TrainingConfig, TrainingJob
from dflash_core.training.features.pipeline import Pipeline, computed, prepared
from dflash_core.training.features.transfer import Receiver, send_features
from dflash_core.training.objectives.drafter import Layout
from dflash_core.training.ranks.groups import Ranks, join_ranks
from tests.tiny import TINY_LAYER_IDS, tiny_target

NUM_FEATURES = 96
WARM_UP = 5
STEPS = 40
PACES = ((0.03, 0.03), (0.04, 0.02), (0.02, 0.04))
TOPOLOGIES = ((1, 1), (2, 2), (1, 3))


class SleepTrial(FrozenModel):
    """One run with sleeps.

    Each micro-batch takes the target ``target_s`` and the drafter ``draft_s``.
    """

    job: TrainingJob
    target_s: float
    draft_s: float
    out: Path


@dataclass(frozen=True)
class Sleeper:
    """Stands in for the target: features of the right shape after a sleep."""

    seconds: float

    def __call__(self, micro_batch: MicroBatch, batch: DraftBatch) -> Tensor:
        time.sleep(self.seconds)
        return torch.zeros(len(batch.context_index_M), NUM_FEATURES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, default=Path("configs/demo_target"))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run_rank(SleepTrial.model_validate_json(arguments.rank.read_bytes()))
        return
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        for targets, drafters in TOPOLOGIES:
            for target_s, draft_s in PACES:
                with_sleeps(work, (targets, drafters), (target_s, draft_s), arguments.steps)
        with_models(work, arguments.target, arguments.steps)


def with_sleeps(work: Path, ranks: tuple[int, int], pace: tuple[float, float], steps: int) -> None:
    targets, drafters = ranks
    job = make_job(work, tiny_parts(work), ranks, steps + WARM_UP)
    trial = SleepTrial(job=job, target_s=pace[0], draft_s=pace[1], out=work / "out.json")
    file = work / "trial.json"
    file.write_text(trial.model_dump_json())
    torchrun(targets + drafters, str(Path(__file__).resolve()), "--rank", str(file))
    found = json.loads(trial.out.read_text())
    slower_s = max(found["target_alone_s"], found["draft_alone_s"])
    print(
        f"sleeps, {targets} target + {drafters} drafter ranks, "
        f"{1e3 * pace[0]:.0f} and {1e3 * pace[1]:.0f} ms: step {1e3 * found['step_s']:.1f} ms, "
        f"slower side alone {1e3 * slower_s:.1f} ms, ratio {found['step_s'] / slower_s:.3f}",
        flush=True,
    )


def with_models(work: Path, target: Path, steps: int) -> None:
    """Run the program itself."""
    store = work / "demo-store"
    store_functions(store, target, max_length=512, most=600)
    job = make_job(work, (target, store), (1, 1), steps + WARM_UP, layer_ids=(1, 3, 4))
    file = work / "job.json"
    file.write_text(job.model_dump_json())
    torchrun(2, "-m", "dflash_core.training", "--config", str(file))
    lines = (job.run_dir / "metrics.jsonl").read_text().splitlines()[WARM_UP:]
    ran = [json.loads(line) for line in lines]
    step_s, target_s, draft_s = (
        float(np.mean([line[name] for line in ran])) for name in ("step_s", "target_s", "draft_s")
    )
    slower_s = max(target_s, draft_s)
    print(
        f"models, 1 target + 1 drafter rank: step {1e3 * step_s:.0f} ms, target "
        f"{1e3 * target_s:.0f} ms, drafter {1e3 * draft_s:.0f} ms, ratio {step_s / slower_s:.3f}"
    )


def tiny_parts(work: Path) -> tuple[Path, Path]:
    target, store = work / "target", work / "store"
    if not store.exists():
        store_functions(store, tiny_target(target), max_length=96, most=400)
    return target, store


def store_functions(store: Path, target: Path, *, max_length: int, most: int) -> None:
    chats = store.with_name(f"{store.name}.jsonl")
    write_stdlib_chats(chats, "train", most=most)
    config = PrepareConfig(max_length=max_length, max_reject_share=1)
    prepare_store([chats], target, store, config)


def make_job(
    work: Path,
    parts: tuple[Path, Path],
    ranks: tuple[int, int],
    steps: int,
    *,
    layer_ids: tuple[int, ...] = TINY_LAYER_IDS,
) -> TrainingJob:
    targets, drafters = ranks
    target, store = parts
    topology = TopologyConfig(
        kind="disaggregated", num_ranks=targets + drafters, num_target_ranks=targets
    )
    return TrainingJob(
        run_dir=work / "run",
        store=store,
        target=TargetConfig(path=target, layer_ids=layer_ids),
        draft=DraftConfig(num_layers=2, block_size=8),
        batching=BatchingConfig(
            strategy="random", token_budget=1024, micro_batches_per_step=2 * drafters
        ),
        training=TrainingConfig(
            epochs=20, max_steps=steps, topology=topology, resume=False, timeout_s=60.0
        ),
    )


def torchrun(num_ranks: int, *words: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    subprocess.run(
        [*command, f"--nproc-per-node={num_ranks}", *words],
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def run_rank(trial: SleepTrial) -> None:
    """Be one rank: everything real but the two forwards."""
    job = trial.job
    store = TokenStore.open(job.store)
    with join_ranks(job.training) as ranks:
        epochs = Epochs(job, store, None)
        layout = Layout(store, None, job.draft.block_size, 0, job)
        if ranks.is_consumer:
            consume(trial, ranks, epochs, layout)
        else:
            works = epochs.stream(0, target=ranks.rank - ranks.num_consumers)
            depth = job.training.topology.queue_depth
            prefetch = stage(prepared(works, layout), "prefetch", depth, ranks)
            source = Sleeper(trial.target_s)
            forward = stage(computed(prefetch, source, ranks.device), "target", depth, ranks)
            send_features(forward, ranks)
            forward.close()
            prefetch.close()
        ranks.meet(what="the end of the run")


def stage(items: Any, name: str, depth: int, ranks: Ranks) -> Stage[Any]:
    return Stage(items, depth=depth, name=name, lane=ranks.lane(), timeout_s=ranks.timeout_s)


def consume(trial: SleepTrial, ranks: Ranks, epochs: Epochs, layout: Layout) -> None:
    depth = trial.job.training.topology.queue_depth
    pipeline = Pipeline(
        epochs.stream(0, consumer=ranks.rank),
        layout,
        ranks,
        depth=depth,
        receiver=Receiver(ranks, NUM_FEATURES, torch.float32, depth),
    )
    gradient = torch.zeros(1 << 16)
    begin = 0.0
    for step in range(epochs.num_steps):
        if step == WARM_UP:
            begin = time.perf_counter()
        for work in epochs.work(step):
            if work.consumer == ranks.rank:
                pipeline.take()
                time.sleep(trial.draft_s)
        ranks.add(gradient, what=f"step {step + 1}")
    step_s = (time.perf_counter() - begin) / (epochs.num_steps - WARM_UP)
    pipeline.close()
    if ranks.is_first:
        trial.out.write_text(json.dumps({"step_s": step_s, **alone(trial, epochs)}))


def alone(trial: SleepTrial, epochs: Epochs) -> dict[str, float]:
    """Return the seconds per step that each side takes with nobody to wait for.

    Drafter ranks meet in every step, so each step takes as long as its fullest rank; target ranks
    never meet, so their side takes as long as the fullest of them over the whole run.
    """
    steps = range(WARM_UP, epochs.num_steps)
    works = [epochs.work(step) for step in steps]
    fullest = [max(np.bincount([work.consumer for work in step])) for step in works]
    per_target = np.bincount([work.target for step in works for work in step])
    return {
        "target_alone_s": float(per_target.max()) * trial.target_s / len(steps),
        "draft_alone_s": float(np.mean(fullest)) * trial.draft_s,
    }


if __name__ == "__main__":
    main()
