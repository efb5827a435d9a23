"""Real acceptance on held-out prompts."""

from pathlib import Path

import torch
from prefect import task
from prefect.cache_policies import NO_CACHE

from configs.settings import Settings
from dflash_core.corpus.masking.encoding import other_encoder
from dflash_core.corpus.store import TokenStore
from dflash_core.decoding.acceptance import evaluate_drafter
from dflash_core.decoding.prompts import Prompt, store_prompts
from dflash_core.decoding.report import AcceptanceReport
from dflash_core.errors import TrainingError
from dflash_core.target.loading import load_target
from dflash_core.training.drafter import load_checkpoint_drafter
from tasks.console import OnProgress, announce, progress
from tasks.launching.gpu_pool import decoding_device

__all__ = ["evaluate", "measure"]


@task(name="evaluate", cache_policy=NO_CACHE)
def evaluate(settings: Settings, drafter: Path, held_out: Path) -> AcceptanceReport:
    """Decode held-out prompts with and without the drafter; see `measure`."""
    return measure(settings, drafter, held_out)


def measure(settings: Settings, drafter: Path, held_out: Path) -> AcceptanceReport:
    """Decode held-out prompts with and without a drafter.

    Raises:
        TrainingError: In float32 a text differs from the target's own where no tie explains it.
    """
    prompts = store_prompts(TokenStore.open(held_out))
    if prompts and (sentence := other_encoder(drafter, prompts[0].encoder)):
        announce(sentence)
    with decoding_device(settings) as device, progress("texts decoded") as on_progress:
        report = _decode(settings, drafter, prompts, device, on_progress)
    announce(f"acceptance: {report.words}")
    for speed in report.more_speeds:
        announce(f"speed: {speed.words or f'{speed.speculative_tokens_per_s:,.0f} tokens/s'}")
    if report.has_faults and report.exactness is not None:
        raise TrainingError(
            f"{report.exactness.words}; the limit of a tie is {report.exactness.tie_gap:g} of the "
            "largest logit (evaluation.tie_gap)"
        )
    return report


def _decode(
    settings: Settings,
    drafter: Path,
    prompts: list[Prompt],
    device: torch.device,
    on_progress: OnProgress,
) -> AcceptanceReport:
    """Decode on a device; its models are gone when this returns."""
    target = load_target(settings.target, device=device)
    return evaluate_drafter(
        target,
        load_checkpoint_drafter(drafter).to(device, target.lm_head.weight.dtype),
        prompts,
        settings.evaluation,
        on_progress=on_progress,
    )
