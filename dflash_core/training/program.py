"""What each rank of ``torchrun -m dflash_core.training --config job.json`` does."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dflash_core.corpus.store import TokenStore
from dflash_core.errors import ConfigError
from dflash_core.training.batches.schedule import Epochs
from dflash_core.training.checkpoint import (
    Cursor,
    checkpoint_path,
    checkpoints_folder,
    latest_checkpoint,
    read_cursor,
    set_aside,
)
from dflash_core.training.config import TrainingJob, check_job
from dflash_core.training.entry import read_job, run_program, steps_so_far
from dflash_core.training.fill import fill_cache
from dflash_core.training.ranks.groups import Ranks
from dflash_core.training.ranks.stop import StopRequest
from dflash_core.training.roles import Stores, consuming_role, serve_target
from dflash_core.training.telemetry.held_out import check_held_out
from dflash_core.training.telemetry.metrics import write_status
from dflash_core.training.telemetry.status import STATUS_NAME
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
    try:
        job = read_job(arguments.config)
    except ConfigError as error:
        sys.stderr.write(f"ConfigError: {error}\n")
        return error.exit_code
    job.run_dir.mkdir(parents=True, exist_ok=True)
    if os.environ.get("RANK", "0") == "0":
        # An attempt before this one may have ended as failed.
        step, num_steps = steps_so_far(job.run_dir)
        (job.run_dir / STATUS_NAME).unlink(missing_ok=True)
        write_status(job.run_dir, "running", step=step, num_steps=num_steps)
    work = run_fill if arguments.only_features else run_job
    return run_program(job, lambda ranks: work(job, ranks, stop or StopRequest()))


def run_job(job: TrainingJob, ranks: Ranks, stop: StopRequest | None = None) -> None:
    """Train on this rank and, at the end, write the model.

    Raises:
        DFlashError: Something is wrong with the job, or the run failed.
    """
    check_job(job)
    held_out = None if job.held_out_store is None else TokenStore.open(job.held_out_store)
    stores = Stores(TokenStore.open(job.store), held_out)
    epochs = Epochs(job, stores.train, held_out)
    check_held_out(job, held_out, epochs)
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
    step, weights = trainer.best_weights() if finished else (0, {})
    if finished and ranks.is_first:
        facts = {
            "plan": epochs.plan(0).content_hash,
            "store": stores.train.content_hash,
            "step": step,
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
    check_job(job)
    held_out = None if job.held_out_store is None else TokenStore.open(job.held_out_store)
    fill_cache(job, Stores(TokenStore.open(job.store), held_out), ranks, stop)
    ranks.meet(what="the end of the features")


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
    folder = checkpoints_folder(job.run_dir)
    step = 0
    if ranks.is_first and job.training.resume:
        latest = latest_checkpoint(folder)
        if latest is not None:
            step = read_cursor(latest, ingredients).step
    step = ranks.agree(step, what="the choice of a checkpoint")
    if ranks.is_first and (moved := set_aside(folder, after=step)):
        names = ", ".join(path.name for path in moved)
        print(  # noqa: T201  (torchrun's own log)
            f"the run goes on from step {step}; later checkpoints ({names}) are now in "
            f"{moved[0].parent}",
            flush=True,
        )
    if step == 0:
        return Cursor(ingredients=ingredients)
    return read_cursor(checkpoint_path(folder, step), ingredients)


def _ingredients(job: TrainingJob, epochs: Epochs, stores: Stores) -> dict[str, str]:
    training = job.training
    sections = {
        "target": job.target,
        "draft": job.draft,
        "loss": job.loss,
        "training.optimizer": training.optimizer,
    }
    return {
        **epochs.ingredients(),
        "store": stores.train.content_hash,
        "held-out store": "none" if stores.held_out is None else stores.held_out.content_hash,
        **{
            f"{section}.{name}": str(value)
            for section, settings in sections.items()
            for name, value in settings.model_dump(mode="json").items()
        },
        "training.precision": training.precision,
        "training.objective": training.objective,
    }
