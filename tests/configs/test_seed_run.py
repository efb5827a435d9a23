"""The run that the project starts from: its settings, its plan in full, its launch in small."""

from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from configs.settings import Settings, load_settings
from dflash_core.config import FrozenModel
from dflash_core.corpus.store import Sample, write_store
from dflash_core.planning import plan_epoch
from dflash_core.training.config import TrainingJob
from tests.dflash_core.training.conftest import read_steps, run_ranks, status
from tests.tiny import TINY_LAYER_IDS, tiny_target

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SHARES = (0, 0.167, 0.333, 0.5, 0.667, 0.833, 0.9, 0.99, 1)
QUANTILES = (65, 770, 1216, 1727, 2432, 3296, 4200, 4917, 8191)
# Padding efficiency that is known of each: six given edges, and pools sorted inside.
EFFICIENCY = {"seed-8gpu": 0.827, "seed-8gpu-own": 0.992}
SCALE = 48
Model = TypeVar("Model", bound=FrozenModel)


def seed_shape(num_samples: int) -> np.ndarray:
    draws = np.random.default_rng(0).random(num_samples)
    return np.interp(draws, SHARES, QUANTILES).astype(np.int64)


def settings_of(name: str) -> Settings:
    return load_settings(CONFIGS / f"{name}.toml")


def laid_over(model: Model, **changes: object) -> Model:
    return type(model).model_validate({**model.model_dump(), **changes})


@pytest.mark.parametrize("name", EFFICIENCY)
def test_it_is_planned_on_its_own_lengths(name: str) -> None:
    settings = settings_of(name)
    lengths = seed_shape(902_087)
    plan = plan_epoch(
        lengths,
        settings.batching,
        epoch=0,
        seed=settings.training.seed,
        world_size=settings.training.topology.num_consumers,
    )
    assert int(plan.real_tokens.sum()) == 1_831_617_928
    assert int(plan.slots.max()) <= 49_152
    assert plan.num_dropped == 0
    assert plan.padding_efficiency == pytest.approx(EFFICIENCY[name], abs=0.001)
    assert plan.num_steps == -(-plan.num_micro_batches // 32)


def test_only_the_batching_differs_between_the_two() -> None:
    given, own = (settings_of(name).model_dump() for name in EFFICIENCY)
    differing = {section for section in given if given[section] != own[section]}
    assert differing == {"batching", "compare", "gate"}


@pytest.mark.parametrize(
    "name", ["seed-8gpu", pytest.param("seed-8gpu-own", marks=pytest.mark.integration)]
)
def test_it_launches_on_eight_ranks_with_a_tiny_target_in_its_place(
    name: str, tmp_path: Path
) -> None:
    """Every setting is the run's own but for the model, the device and 48 times shorter lengths."""
    settings = settings_of(name)
    lengths = seed_shape(400) // SCALE
    rng = np.random.default_rng(0)
    write_store(
        tmp_path / "store",
        (
            Sample(
                rng.integers(10, 300, n).astype(np.int32), np.arange(n) >= n // 3, "seed", str(i)
            )
            for i, n in enumerate(lengths.tolist())
        ),
    )
    batching, training = settings.batching, settings.training
    job = TrainingJob(
        run_dir=tmp_path / "run",
        store=tmp_path / "store",
        target=laid_over(
            settings.target, path=tiny_target(tmp_path / "target"), layer_ids=TINY_LAYER_IDS
        ),
        draft=laid_over(settings.draft, num_layers=1),
        loss=laid_over(settings.loss, attention="sliced"),
        batching=laid_over(
            batching,
            token_budget=batching.token_budget // SCALE,
            edges=batching.edges and [-(-edge // SCALE) for edge in batching.edges],
        ),
        training=laid_over(training, device="cpu", max_steps=2),
    )
    assert job.training.topology.num_ranks == 8
    assert run_ranks(job) == [0] * 8
    assert status(job)["state"] == "finished"
    assert len(read_steps(job)) == 2
