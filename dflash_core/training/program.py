"""What each rank of ``torchrun -m dflash_core.training --config job.json`` does."""

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import ValidationError

from dflash_core.artifacts import content_digest
from dflash_core.corpus.store import TokenStore
from dflash_core.errors import ConfigError, DFlashError
from dflash_core.training.checkpoint import (
    Cursor,
    checkpoint_path,
    latest_checkpoint,
    read_cursor,
)
from dflash_core.training.config import TrainingJob
from dflash_core.training.epochs import Epochs
from dflash_core.training.fill import fill_cache
from dflash_core.training.monitor import STATUS_NAME, write_status
from dflash_core.training.ranks import Ranks, join_ranks
from dflash_core.training.roles import Stores, consuming_role, serve_target
from dflash_core.training.stop import StopRequest
from dflash_core.training.trainer import Trainer

__all__ = ["main", "run_fill", "run_job"]


def main(argv: Sequence[str] | None = None, *, stop: StopRequest | None = None) -> int:
    """Run a job on this rank; every failure leaves its reason in ``status.json``."""
    parser = argparse.ArgumentParser(prog="python -m dflash_core.training")
    parser.add_argument("--config", type=Path, required=True, help="the run's job.json")
    parser.add_argument(
        "--only-features", action="store_true", help="fill the feature cache and train nothing"
    )
    arguments = parser.parse_args(argv)
    file = arguments.config
    try:
        job = TrainingJob.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        sys.stderr.write(f"ConfigError: {file} is no training job: {error}\n")
        return ConfigError.exit_code
    job.run_dir.mkdir(parents=True, exist_ok=True)
    if os.environ.get("RANK", "0") == "0":
        # An attempt before this one may have ended as failed.
        step, num_steps = _steps(job.run_dir)
        write_status(job.run_dir, "running", step=step, num_steps=num_steps)
    try:
        with join_ranks(job.training) as ranks:
            work = run_fill if arguments.only_features else run_job
            code = _guarded(work, job, ranks, stop or StopRequest())
            if code and ranks.world_size > 1:
                _leave(code)
            return code
    except DFlashError as error:  # the group could not be joined, or not be left
        return _failed(job.run_dir, error)


def run_job(job: TrainingJob, ranks: Ranks, stop: StopRequest | None = None) -> None:
    """Train on this rank and, at the end, write the model.

    Raises:
        DFlashError: Something is wrong with the job, or the run failed.
    """
    _check(job)
    heldout = None if job.heldout_store is None else TokenStore.open(job.heldout_store)
    stores = Stores(TokenStore.open(job.store), heldout)
    epochs = Epochs(job, stores.train, heldout)
    cursor = _find_cursor(job, ranks, _ingredients(job, epochs, stores))
    if not ranks.is_consumer:
        serve_target(job, stores, epochs, ranks, first_step=cursor.step)
        ranks.meet(what="the end of the run")
        return
    role = consuming_role(job, stores, epochs, ranks, first_step=cursor.step)
    request = stop or StopRequest()
    trainer = Trainer(job, role.objective, epochs, role.validation, ranks, cursor, request)
    if job.training.preflight and cursor.step == 0:
        trainer.preflight(role.pipeline, cache_bytes=role.cache_bytes)
    finished = trainer.run(role.pipeline)
    role.pipeline.close()
    weights = trainer.best_weights() if finished else {}
    if finished and ranks.is_first:
        facts = {
            "plan": epochs.plan(0).content_hash,
            "store": stores.train.content_hash,
            "step": trainer.cursor.best_step or trainer.cursor.step,
            "job": json.loads(job.model_dump_json()),
        }
        role.objective.save(job.run_dir, weights, facts)
        _tell_finished(job, epochs, trainer.cursor)
    ranks.meet(what="the end of the run")


def run_fill(job: TrainingJob, ranks: Ranks, stop: StopRequest) -> None:
    """Fill the job's feature cache on this rank.

    Raises:
        DFlashError: As `run_job`.
    """
    _check(job)
    heldout = None if job.heldout_store is None else TokenStore.open(job.heldout_store)
    fill_cache(job, Stores(TokenStore.open(job.store), heldout), ranks, stop)
    ranks.meet(what="the end of the features")


def _guarded(
    work: Callable[[TrainingJob, Ranks, StopRequest], None],
    job: TrainingJob,
    ranks: Ranks,
    stop: StopRequest,
) -> int:
    """Run, and let the reason be known before peers notice that this rank is gone."""
    try:
        work(job, ranks, stop)
    except DFlashError as error:
        return _failed(job.run_dir, error)
    except Exception as error:  # the reason must reach the flow, whatever it is
        traceback.print_exc()
        return _failed(job.run_dir, error, who=ranks.name)
    return 0


def _leave(code: int) -> None:
    """End at once: threads may wait for peers inside the communication library."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _tell_finished(job: TrainingJob, epochs: Epochs, cursor: Cursor) -> None:
    reason = ""
    if cursor.step < epochs.num_steps:
        reason = f"no gain in {cursor.num_worse} measurements; the best was at step "
        reason += str(cursor.best_step)
    write_status(
        job.run_dir, "finished", step=cursor.step, num_steps=epochs.num_steps, reason=reason
    )


def _find_cursor(job: TrainingJob, ranks: Ranks, ingredients: dict[str, str]) -> Cursor:
    """Return where the run goes on; rank 0 looks, so that all ranks take the same checkpoint."""
    folder = job.run_dir / "checkpoints"
    step = 0
    if ranks.is_first and job.training.resume:
        latest = latest_checkpoint(folder)
        if latest is not None:
            step = read_cursor(latest, ingredients).step
    step = ranks.agree(step, what="the choice of a checkpoint")
    if step == 0:
        return Cursor(ingredients=ingredients)
    return read_cursor(checkpoint_path(folder, step), ingredients)


def _ingredients(job: TrainingJob, epochs: Epochs, stores: Stores) -> dict[str, str]:
    training = job.training
    shape = {
        "target": job.target.model_dump(mode="json"),
        "draft": job.draft.model_dump(mode="json"),
        "loss": job.loss.model_dump(mode="json"),
        "precision": training.precision,
    }
    return {
        **epochs.ingredients(),
        "store": stores.train.content_hash,
        "held-out store": "none" if stores.heldout is None else stores.heldout.content_hash,
        "model": content_digest(shape),
        "optimizer": content_digest(training.optimizer.model_dump(mode="json")),
        "objective": training.objective,
    }


def _check(job: TrainingJob) -> None:
    training = job.training
    disaggregated = training.topology.kind == "disaggregated"
    if disaggregated and training.objective == "target":
        raise ConfigError(
            "training.objective 'target' has no frozen target to put on ranks of its own; set "
            "training.topology.kind to 'colocated'"
        )
    if disaggregated and training.features == "cache":
        raise ConfigError(
            "training.features 'cache' is filled and read by the rank that trains; set "
            "training.topology.kind to 'colocated'"
        )
    sharded = training.topology.shard_target
    if sharded and (training.features == "cache" or training.objective == "target"):
        raise ConfigError(
            "training.topology.shard_target spreads a target that runs equally often on all its "
            f"ranks, which features '{training.features}' with objective '{training.objective}' "
            "does not; leave it out (training.topology.shard_trained spreads what is trained), or "
            "set training.features to 'online' and training.objective to 'draft'"
        )
    if sharded and job.draft.initial_weights == "target":
        raise ConfigError(
            "draft.initial_weights 'target' copies whole layers, which training.topology."
            "shard_target spreads over ranks; set draft.initial_weights to 'random'"
        )
    if training.validation.every_steps is not None and job.heldout_store is None:
        raise ConfigError(
            f"training.validation.every_steps is {training.validation.every_steps} but there are "
            "no held-out samples; set heldout_store"
        )
    accept = training.validation.accept_every_steps
    if accept is not None and (disaggregated or sharded or training.objective == "target"):
        raise ConfigError(
            f"training.validation.accept_every_steps is {accept}, but decoding needs drafter and "
            "whole target on one rank; set training.topology.kind to 'colocated' without "
            "shard_target and training.objective to 'draft', or leave it out"
        )


def _failed(run_dir: Path, error: Exception, *, who: str = "") -> int:
    """Record the first failure; the peers' errors only follow from it."""
    reason = f"{who}: {type(error).__name__}: {error}" if who else str(error)
    sys.stderr.write(f"{type(error).__name__}: {reason}\n")
    code = error.exit_code if isinstance(error, DFlashError) else 1
    file = run_dir / STATUS_NAME
    state = json.loads(file.read_bytes())["state"] if file.is_file() else ""
    if state != "failed":
        step, num_steps = _steps(run_dir)
        write_status(run_dir, "failed", step=step, num_steps=num_steps, reason=reason)
    return code


def _steps(run_dir: Path) -> tuple[int, int]:
    """Return the steps done and those of the run, as the status file has them."""
    file = run_dir / STATUS_NAME
    status = json.loads(file.read_bytes()) if file.is_file() else {}
    return int(status.get("step", 0)), int(status.get("num_steps", 0))
