"""What held-out samples can be measured by: tokens with a loss, and prompts to decode from."""

import numpy as np

from dflash_core.corpus.store import Sample, TokenStore
from dflash_core.draft.anchors import eligible_anchors
from dflash_core.errors import ConfigError
from dflash_core.training.batches.schedule import Epochs
from dflash_core.training.config import TrainingJob

__all__ = ["check_held_out", "prompts_of"]


def check_held_out(job: TrainingJob, held_out: TokenStore | None, epochs: Epochs) -> None:
    """Look whether held-out samples give what is to be measured.

    Raises:
        ConfigError: All measurements would be of nothing.
    """
    validation = job.training.validation
    if held_out is None or validation.every_steps is None:
        return
    most = epochs.plan(0).max_length
    drafts = job.training.objective == "draft"
    masks = (held_out[index].loss_mask[:most] for index in epochs.held_out_samples.tolist())
    if not any(len(eligible_anchors(mask)) if drafts else mask[1:].any() for mask in masks):
        raise ConfigError(
            f"training.validation.every_steps is {validation.every_steps}, but none of the "
            f"{len(held_out):,} held-out samples has {'two' if drafts else 'any'} supervised "
            f"tokens {'in a row ' if drafts else ''}among its first {most:,}; give others, or "
            "leave every_steps out"
        )
    accept = validation.accept_every_steps
    if accept is not None and not prompts_of(job, held_out, epochs):
        raise ConfigError(
            f"training.validation.accept_every_steps is {accept}, but none of the "
            f"{validation.num_prompts} held-out samples that are decoded begins with a prompt, "
            "which are tokens without loss; give others, or leave accept_every_steps out"
        )


def prompts_of(job: TrainingJob, held_out: TokenStore, epochs: Epochs) -> list[tuple[Sample, int]]:
    """Return the samples that prompts are taken of, spread evenly, and each prompt's tokens."""
    chosen = epochs.held_out_samples
    places = np.linspace(0, len(chosen) - 1, job.training.validation.num_prompts)
    samples = [held_out[index] for index in np.unique(chosen[places.astype(np.int64)]).tolist()]
    found = [(sample, int(np.argmax(sample.loss_mask))) for sample in samples]
    return [(sample, start) for sample, start in found if start > 0]
