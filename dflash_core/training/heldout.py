"""What held-out samples can be measured by: tokens with a loss, and prompts to decode from."""

import numpy as np

from dflash_core.corpus.store import Sample, TokenStore
from dflash_core.draft import eligible_anchors
from dflash_core.errors import ConfigError
from dflash_core.training.config import TrainingJob
from dflash_core.training.epochs import Epochs

__all__ = ["check_heldout", "prompts_of"]


def check_heldout(job: TrainingJob, heldout: TokenStore | None, epochs: Epochs) -> None:
    """Look whether held-out samples give what is to be measured.

    Raises:
        ConfigError: All measurements would be of nothing.
    """
    validation = job.training.validation
    if heldout is None or validation.every_steps is None:
        return
    most = epochs.plan(0).max_length
    drafts = job.training.objective == "draft"
    masks = (heldout[index].loss_mask[:most] for index in epochs.heldout_samples.tolist())
    if not any(len(eligible_anchors(mask)) if drafts else mask[1:].any() for mask in masks):
        raise ConfigError(
            f"training.validation.every_steps is {validation.every_steps}, but none of the "
            f"{len(heldout):,} held-out samples has {'two' if drafts else 'any'} supervised tokens "
            f"{'in a row ' if drafts else ''}among its first {most:,}; give others, or leave "
            "every_steps out"
        )
    accept = validation.accept_every_steps
    if accept is not None and not prompts_of(job, heldout, epochs):
        raise ConfigError(
            f"training.validation.accept_every_steps is {accept}, but none of the "
            f"{validation.num_prompts} held-out samples that are decoded begins with a prompt, "
            "which are tokens without loss; give others, or leave accept_every_steps out"
        )


def prompts_of(job: TrainingJob, heldout: TokenStore, epochs: Epochs) -> list[tuple[Sample, int]]:
    """Return the samples that prompts are taken of, spread evenly, and each prompt's tokens."""
    chosen = epochs.heldout_samples
    places = np.linspace(0, len(chosen) - 1, job.training.validation.num_prompts)
    samples = [heldout[index] for index in np.unique(chosen[places.astype(np.int64)]).tolist()]
    found = [(sample, int(np.argmax(sample.loss_mask))) for sample in samples]
    return [(sample, start) for sample, start in found if start > 0]
