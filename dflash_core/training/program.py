"""What each rank of ``torchrun -m dflash_core.training --config job.json`` does."""

import argparse
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from dflash_core.artifacts import content_digest
from dflash_core.corpus.store import TokenStore
from dflash_core.errors import ConfigError, DFlashError
from dflash_core.training.config import TrainingJob
from dflash_core.training.draft_objective import DraftObjective
from dflash_core.training.epochs import Epochs
from dflash_core.training.monitor import STATUS_NAME, write_status
from dflash_core.training.objective import Objective
from dflash_core.training.ranks import Ranks, join_ranks
from dflash_core.training.target_objective import TargetObjective
from dflash_core.training.trainer import Trainer

__all__ = ["main", "run_job"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job on this rank; every failure leaves its reason in ``status.json``."""
    parser = argparse.ArgumentParser(prog="python -m dflash_core.training")
    parser.add_argument("--config", type=Path, required=True, help="the run's job.json")
    file = parser.parse_args(argv).config
    try:
        job = TrainingJob.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        sys.stderr.write(f"ConfigError: {file} is no training job: {error}\n")
        return ConfigError.exit_code
    job.run_dir.mkdir(parents=True, exist_ok=True)
    try:
        with join_ranks(job.training) as ranks:
            run_job(job, ranks)
    except DFlashError as error:
        _say_failed(job.run_dir, f"{type(error).__name__}: {error}")
        return error.exit_code
    except Exception as error:  # the reason must reach the flow, whatever it is
        traceback.print_exc()
        _say_failed(job.run_dir, f"{type(error).__name__}: {error}")
        return 1
    return 0


def run_job(job: TrainingJob, ranks: Ranks) -> None:
    """Train on this rank and, at the end, write the model.

    Raises:
        DFlashError: Something is wrong with the job, or the run failed.
    """
    _check(job)
    store = TokenStore.open(job.store)
    epochs = Epochs(job, store)
    objective = _objective(job, store, ranks)
    ingredients = {
        **epochs.ingredients(),
        "store": store.content_hash,
        "model": content_digest(_shape(job)),
        "optimizer": content_digest(job.training.optimizer.model_dump(mode="json")),
        "objective": job.training.objective,
    }
    trainer = Trainer(job, objective, epochs, ranks, ingredients)
    if not trainer.run():
        return
    if ranks.is_first:
        facts = {
            "plan": epochs.plan(0).content_hash,
            "store": store.content_hash,
            "job": json.loads(job.model_dump_json()),
        }
        objective.save(job.run_dir, facts)
        steps = epochs.num_steps
        write_status(job.run_dir, "finished", step=steps, num_steps=steps)
    ranks.meet(what="the end of the run")


def _check(job: TrainingJob) -> None:
    if job.training.topology.kind == "disaggregated":
        raise ConfigError(
            "training.topology.kind 'disaggregated' cannot be trained yet; set it to 'colocated'"
        )
    if job.batching.strategy == "packed":
        raise ConfigError(
            "batching.strategy 'packed' needs a target that attends within documents, which this "
            "trainer does not drive yet; set it to sorted, random, bucketed or pooled"
        )


def _objective(job: TrainingJob, store: TokenStore, ranks: Ranks) -> Objective:
    training = job.training
    if training.objective == "target":
        return TargetObjective(
            job.target,
            store,
            seed=training.seed,
            device=ranks.device,
            precision=training.precision,
        )
    return DraftObjective(
        job.target,
        job.draft,
        job.loss,
        job.batching.anchors,
        store,
        seed=training.seed,
        device=ranks.device,
        precision=training.precision,
        init_drafter=job.init_drafter,
    )


def _shape(job: TrainingJob) -> dict[str, object]:
    return {
        "target": job.target.model_dump(mode="json"),
        "draft": job.draft.model_dump(mode="json"),
        "loss": job.loss.model_dump(mode="json"),
        "precision": job.training.precision,
    }


def _say_failed(run_dir: Path, reason: str) -> None:
    """Record the first failure; the peers' errors only follow from it."""
    sys.stderr.write(f"{reason}\n")
    file = run_dir / STATUS_NAME
    if file.is_file() and json.loads(file.read_bytes())["state"] == "failed":
        return
    step = json.loads(file.read_bytes())["step"] if file.is_file() else 0
    write_status(run_dir, "failed", step=step, reason=reason.split(": ", 1)[-1])
