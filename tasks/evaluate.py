"""Real acceptance on held-out prompts."""

from collections.abc import Callable
from pathlib import Path

import torch
from prefect import task
from prefect.cache_policies import NO_CACHE

from configs.settings import Settings
from dflash_core.corpus.encoding import encoder_in, other_encoder
from dflash_core.corpus.store import TokenStore
from dflash_core.decoding import AcceptanceReport, Prompt, evaluate_drafter, store_prompts
from dflash_core.errors import TrainingError
from dflash_core.export import load_checkpoint_drafter
from dflash_core.target import load_target
from tasks.console import announce, progress
from tasks.gpu_pool import decoding_device

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
    if sentence := other_encoder(drafter, encoder_in(held_out)):
        announce(sentence)
    total = min(len(prompts), settings.evaluation.max_prompts or len(prompts))
    done = 0
    with decoding_device(settings) as device, progress("prompts decoded") as on_progress:

        def on_prompts(count: int) -> None:
            nonlocal done
            done += count
            on_progress(done, total)

        report = _decode(settings, drafter, prompts, device, on_prompts)
    announce(f"acceptance: tau {report.tau:.2f} over {report.overall.num_prompts} prompts")
    exact = report.exactness
    if exact is not None and exact.num_faults and settings.target.dtype == "float32":
        raise TrainingError(
            f"{exact.num_faults} of {report.overall.num_prompts} texts differ from the target's "
            f"own greedy text with a top-2 gap of up to {exact.largest_gap:.2g}; the limit is "
            f"{exact.tie_gap:g} (evaluation.tie_gap)"
        )
    return report


def _decode(
    settings: Settings,
    drafter: Path,
    prompts: list[Prompt],
    device: torch.device,
    on_prompts: Callable[[int], None],
) -> AcceptanceReport:
    """Decode on a device; its models are gone when this returns."""
    target = load_target(settings.target, device=device)
    return evaluate_drafter(
        target,
        load_checkpoint_drafter(drafter).to(device, target.lm_head.weight.dtype),
        prompts,
        settings.evaluation,
        on_prompts=on_prompts,
    )
