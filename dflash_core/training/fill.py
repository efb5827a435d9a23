"""Capture the features of every sample ahead of training, so that training needs no target."""

from dflash_core.config import changed
from dflash_core.errors import ConfigError
from dflash_core.training.batches.schedule import Epochs
from dflash_core.training.config import TrainingJob
from dflash_core.training.ranks.groups import Ranks
from dflash_core.training.ranks.stop import StopRequest
from dflash_core.training.roles import Stores, colocated_source, layout_of
from dflash_core.training.telemetry.metrics import write_status

__all__ = ["fill_cache"]

ROUND = 8  # micro-batches of a rank between two agreements


def fill_cache(job: TrainingJob, stores: Stores, ranks: Ranks, stop: StopRequest) -> None:
    """Read or capture the features of all training and held-out samples; every rank calls this.

    Micro-batches are those of the first epoch, so that its losses are an online run's bit for bit.
    What is there already is checked and kept: the same call goes on where one was stopped.

    Raises:
        ConfigError: The job keeps no features, or they do not fit the quota.
    """
    if job.training.features != "cache" or job.training.topology.kind != "colocated":
        raise ConfigError(
            f"training.features is '{job.training.features}' and training.topology.kind is "
            f"'{job.training.topology.kind}', so no features are kept; set them to 'cache' and "
            "'colocated'"
        )
    # All of them, however few steps a first run takes.
    training = changed(job.training, {"max_steps": None})
    job = changed(job, {"training": training})
    epochs = Epochs(job, stores.train, stores.held_out)
    target, source = colocated_source(job, stores, epochs, ranks)
    layout = layout_of(job, stores, target, ranks)
    plan = epochs.plan(0)
    works = [epochs.micro_batch(0, index) for index in range(plan.num_micro_batches)]
    works += [] if stores.held_out is None else epochs.held_out_batches
    state, done = "finished", 0
    while done < len(works):
        upto = min(done + ROUND * ranks.world_size, len(works))
        for micro_batch in works[done + ranks.rank : upto : ranks.world_size]:
            batch = layout(micro_batch)
            source(micro_batch, batch.to(ranks.device) if layout.pin else batch)
        done = upto
        if ranks.any(stop.asked, what=f"the features of micro-batch {done}"):
            state = "interrupted" if done < len(works) else state
            break
        if ranks.is_first:
            write_status(job.run_dir, "running", step=done, num_steps=len(works))
    if ranks.is_first:
        write_status(job.run_dir, state, step=done, num_steps=len(works))
        print(  # noqa: T201  (torchrun's own log)
            f"features of {done:,} of {len(works):,} micro-batches are in "
            f"{job.training.cache.path}",
            flush=True,
        )
