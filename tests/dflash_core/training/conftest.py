"""A tiny run: random target, a few real samples, two gloo ranks when a test asks for them."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from dflash_core.corpus.stdlib_store import store_stdlib
from dflash_core.draft.config import DraftConfig
from dflash_core.planning.config import BatchingConfig
from dflash_core.target.config import TargetConfig
from dflash_core.training.config import TopologyConfig, TrainingConfig, TrainingJob
from tests.tiny import TINY_LAYER_IDS, tiny_target


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    tiny_target(folder / "target")
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    store_stdlib(folder / "store", tokenizer, split="held_out", max_length=192, max_samples=40)
    return folder


MakeJob = Callable[..., TrainingJob]


@pytest.fixture
def make_job(parts: Path, tmp_path: Path) -> MakeJob:
    def make(
        *,
        name: str = "run",
        objective: str = "draft",
        num_ranks: int = 1,
        epochs: int = 2,
        micro_batches_per_step: int = 2,
        **training: object,
    ) -> TrainingJob:
        settings = {
            "objective": objective,
            "epochs": epochs,
            "checkpoint_every_steps": 3,
            "topology": TopologyConfig(num_ranks=num_ranks),
            "timeout_s": 60.0,
            **training,
        }
        return TrainingJob(
            run_dir=tmp_path / name,
            store=parts / "store",
            target=TargetConfig(path=parts / "target", layer_ids=TINY_LAYER_IDS),
            draft=DraftConfig(num_layers=1, block_size=4),
            batching=BatchingConfig(
                strategy="random",
                token_budget=1024,
                micro_batches_per_step=micro_batches_per_step,
            ),
            training=TrainingConfig.model_validate(settings),
        )

    return make


def start_ranks(job: TrainingJob) -> "subprocess.Popen[str]":
    """Start a job under torchrun."""
    job.run_dir.mkdir(parents=True, exist_ok=True)
    file = job.run_dir / "job.json"
    file.write_text(job.model_dump_json())
    ranks = job.training.topology.num_ranks
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={ranks}", "--shutdown-timeout=10"),
        *("-m", "dflash_core.training", "--config", str(file)),
    ]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
