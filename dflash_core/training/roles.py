"""What a rank is made of: the parts of a consuming rank, and what a target rank does."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import transformers
from numpy.typing import NDArray

from dflash_core.corpus.store import TokenStore
from dflash_core.draft.build import draft_spec, find_mask_token
from dflash_core.target.loading import Target, load_target, target_digest
from dflash_core.training.batches.length_groups import group_of, length_edges
from dflash_core.training.batches.prefetch import Stage
from dflash_core.training.batches.schedule import Epochs
from dflash_core.training.config import TrainingJob
from dflash_core.training.features.cache import FeatureCache, cache_bytes, make_room
from dflash_core.training.features.lockstep import InStep, laid_out, load_for_ranks
from dflash_core.training.features.pipeline import Pipeline, computed, prepared
from dflash_core.training.features.source import (
    CachedFeatures,
    FeatureSource,
    OnlineFeatures,
    feature_shape,
)
from dflash_core.training.features.transfer import Receiver, send_features
from dflash_core.training.memory.preflight import preflight, target_run
from dflash_core.training.objectives.base import Objective
from dflash_core.training.objectives.drafter import DraftObjective, Layout
from dflash_core.training.objectives.target import TargetObjective
from dflash_core.training.ranks.fsdp import whole
from dflash_core.training.ranks.groups import Ranks
from dflash_core.training.telemetry.held_out import prompts_of
from dflash_core.training.telemetry.validation import Validation
from dflash_core.training.tokens import check_tokens

__all__ = [
    "ConsumingRole",
    "Stores",
    "colocated_source",
    "consuming_role",
    "layout_of",
    "serve_target",
]


@dataclass(frozen=True)
class Stores:
    """The samples: for training, and held out."""

    train: TokenStore
    held_out: TokenStore | None


@dataclass(frozen=True)
class ConsumingRole:
    """Parts of a rank that consumes micro-batches."""

    objective: Objective
    pipeline: Pipeline
    validation: Validation
    cache_bytes: int
    """What keeping all features on disk would take; 0 without a target."""


def consuming_role(
    job: TrainingJob, stores: Stores, epochs: Epochs, ranks: Ranks, *, first_step: int
) -> ConsumingRole:
    """Build what trains on this rank.

    Args:
        job: The run.
        stores: The samples.
        epochs: The plans.
        ranks: This process among the others.
        first_step: Step that the run goes on from.

    Raises:
        DFlashError: Target, drafter and settings do not fit together.
    """
    source: FeatureSource | None = None
    receiver: Receiver | None = None
    accept: Callable[[Callable[[], None]], float] | None = None
    in_step: InStep | None = None
    topology = job.training.topology
    target: Target | None = None
    if job.training.objective == "target":
        objective: Objective = TargetObjective(job, stores.train, stores.held_out, ranks)
    elif ranks.num_targets:
        copies = job.draft.initial_weights == "target"
        target = load_target(job.target, device=ranks.device, layers=copies)
        _check_tokens(job, stores, target, ranks)
        objective = DraftObjective(job, target, stores.train, stores.held_out, ranks)
        target.drop_layers()
        shape = feature_shape(target, job.loss)
        receiver = Receiver(ranks, *shape, topology.queue_depth)
    else:
        target, source = colocated_source(job, stores, epochs, ranks)
        in_step = _in_step(job, target, ranks)
        objective = DraftObjective(job, target, stores.train, stores.held_out, ranks)
        if job.training.validation.accept_every_steps is not None:
            accept = _acceptance(job, stores, epochs, target, objective, ranks)
    pipeline = Pipeline(
        epochs.stream(first_step, consumer=ranks.rank),
        objective.prepare,
        ranks,
        depth=topology.queue_depth,
        source=source,
        receiver=receiver,
        in_step=in_step,
    )
    groups = _held_out_groups(stores, epochs)
    validation = Validation(job.training.validation, epochs, objective, groups, ranks, accept)
    return ConsumingRole(objective, pipeline, validation, _cache_bytes(job, target, epochs))


def _cache_bytes(job: TrainingJob, target: Target | None, epochs: Epochs) -> int:
    if target is None:
        return 0
    width, dtype = feature_shape(target, job.loss)
    lengths = np.minimum(epochs.lengths, epochs.plan(0).max_length)
    return cache_bytes(lengths, num_features=width, dtype=dtype)


def serve_target(
    job: TrainingJob, stores: Stores, epochs: Epochs, ranks: Ranks, *, first_step: int
) -> None:
    """Run the target for the drafter ranks until they want no more."""
    target = load_for_ranks(job.target, ranks)
    _check_tokens(job, stores, target, ranks)
    layout = layout_of(job, stores, target, ranks)
    depth = job.training.topology.queue_depth
    own = ranks.rank - ranks.num_consumers
    packed = epochs.plan(0).packed
    source = OnlineFeatures(target, packed=packed, final_hidden=job.loss.distils)
    if job.training.preflight and first_step == 0:
        preflight(epochs, target_run(layout, source, ranks.device), ranks)

    def stage(items, name: str) -> Stage:
        return Stage(items, depth=depth, name=name, lane=ranks.lane(), timeout_s=ranks.timeout_s)

    in_step = _in_step(job, target, ranks)
    if in_step is None:
        prefetch = stage(prepared(epochs.stream(first_step, target=own), layout), "prefetch")
        forward = stage(computed(prefetch, source, ranks.device), "target")
    else:
        prefetch = stage(laid_out(epochs.rounds(first_step, target=own), layout), "prefetch")
        forward = stage(in_step.computed(prefetch, source), "target")
    send_features(forward, ranks)
    forward.close()
    if in_step is not None:
        in_step.finish()
    prefetch.close()


def _in_step(job: TrainingJob, target: Target, ranks: Ranks) -> InStep | None:
    if ranks.sharing is None:
        return None
    return InStep(target, ranks, final_hidden=job.loss.distils)


def _check_tokens(job: TrainingJob, stores: Stores, target: Target, ranks: Ranks) -> None:
    both, mask = (stores.train, stores.held_out), find_mask_token(job.draft, target)
    check_tokens(both, ranks, vocab_size=target.vocab_size, mask_token_id=mask)


def layout_of(job: TrainingJob, stores: Stores, target: Target, ranks: Ranks) -> Layout:
    """Return what lays samples out on a rank that has no drafter."""
    spec = draft_spec(job.draft, target)
    return Layout(
        stores.train,
        stores.held_out,
        spec.block_size,
        spec.mask_token_id,
        job,
        pin=ranks.device.type == "cuda",
    )


def colocated_source(
    job: TrainingJob, stores: Stores, epochs: Epochs, ranks: Ranks
) -> tuple[Target, FeatureSource]:
    """Return the target and where its features come from, on a rank that runs both models."""
    given = {"packed": epochs.plan(0).packed, "final_hidden": job.loss.distils}
    if job.training.features == "online":
        target = load_for_ranks(job.target, ranks)
        _check_tokens(job, stores, target, ranks)
        return target, OnlineFeatures(target, **given)
    light = load_target(job.target, layers=False)
    _check_tokens(job, stores, light, ranks)
    caches = _open_caches(job, stores, epochs, light, ranks)
    train, held_out = caches
    validation = job.training.validation
    needed = (
        validation.accept_every_steps is not None
        or job.draft.initial_weights == "target"
        or not train.is_complete(epochs.samples)
        or (
            held_out is not None
            and validation.every_steps is not None
            and not held_out.is_complete(epochs.held_out_samples)
        )
    )
    # Without decoder layers until a sample turns out to be damaged.
    target = load_target(job.target, device=ranks.device, layers=needed)

    def online() -> OnlineFeatures:
        whole = target if needed else load_target(job.target, device=ranks.device)
        return OnlineFeatures(whole, **given)

    return target, CachedFeatures(caches, online, ranks.device, final_hidden=given["final_hidden"])


def _open_caches(
    job: TrainingJob, stores: Stores, epochs: Epochs, target: Target, ranks: Ranks
) -> tuple[FeatureCache, FeatureCache | None]:
    width, dtype = feature_shape(target, job.loss)
    # Rank 0 hashes the target's files once for all.
    digest = int(target_digest(job.target.path)[:15], 16) if ranks.is_first else 0
    digest = ranks.agree(digest, what="the hash of the target")
    most = epochs.plan(0).max_length

    kept = [(stores.train, epochs.samples)]
    if stores.held_out is not None:
        kept.append((stores.held_out, epochs.held_out_samples))
    cut = [np.minimum(store.lengths, most) for store, _ in kept]
    needs = [
        (
            {
                "target": f"{digest:015x}",
                "layer_ids": str(list(target.layer_ids)),
                "final_hidden": str(job.loss.distils),
                "dtype": str(dtype),
                "attention": job.target.attention,
                # Another version's model code may give other features; torch's rounding may not.
                "transformers": transformers.__version__,
                "store": store.content_hash,
                "max_length": str(most),
            },
            cache_bytes(lengths[samples], num_features=width, dtype=dtype),
        )
        for (store, samples), lengths in zip(kept, cut, strict=True)
    ]
    # One rank makes room, the others find it made.
    if not ranks.is_first:
        ranks.meet(what="the feature cache")
    config = job.training.cache
    folders = make_room(config, needs)
    caches = [
        FeatureCache(folder, lengths, num_features=width, dtype=dtype)
        for folder, lengths in zip(folders, cut, strict=True)
    ]
    if ranks.is_first:
        for folder, (_, samples), (_, size) in zip(folders, kept, needs, strict=True):
            print(  # noqa: T201  (torchrun's own log)
                f"features of {len(samples):,} samples take up to {size / 2**30:,.2f} GiB of "
                f"{config.quota_gib:,.2f} GiB in {folder}",
                flush=True,
            )
        ranks.meet(what="the feature cache")
    return caches[0], caches[1] if len(caches) > 1 else None


def _held_out_groups(stores: Stores, epochs: Epochs) -> NDArray[np.int64] | None:
    if stores.held_out is None:
        return None
    return group_of(stores.held_out.lengths, length_edges(epochs.lengths))


def _acceptance(
    job: TrainingJob,
    stores: Stores,
    epochs: Epochs,
    target: Target,
    objective: DraftObjective,
    ranks: Ranks,
) -> Callable[[Callable[[], None]], float]:
    """Return what decodes held-out prompts with the drafter as it is."""
    from dflash_core.decoding.acceptance import evaluate_drafter
    from dflash_core.decoding.cache import drafts_together
    from dflash_core.decoding.config import EvaluationConfig
    from dflash_core.decoding.prompts import Prompt

    assert stores.held_out is not None
    validation = job.training.validation
    config = EvaluationConfig(
        max_new_tokens=validation.max_new_tokens,
        batch_sizes=(validation.num_prompts if drafts_together(target) else 1,),
        compare_plain=False,
    )
    prompts = [
        Prompt(sample.input_ids[:start], sample.domain)
        for sample, start in prompts_of(job, stores.held_out, epochs)
    ]

    def accept(on_round: Callable[[], None]) -> float:
        weights = whole(objective.module.state_dict(keep_vars=True), keep=ranks.is_first)
        if not ranks.is_first:
            return 0.0
        drafter = objective.rebuilt(weights)
        return evaluate_drafter(target, drafter, prompts, config, on_round=on_round).tau

    return accept
