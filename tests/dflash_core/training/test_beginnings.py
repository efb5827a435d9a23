"""What a run begins from is looked at before its first step, and told in one sentence."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from dflash_core.corpus.store import TokenStore, write_store
from dflash_core.errors import ConfigError, DataError, DraftError, TargetError
from dflash_core.training.batches.types import MicroBatch
from dflash_core.training.config import TrainingJob
from dflash_core.training.objectives.target import TargetObjective
from dflash_core.training.ranks.groups import join_ranks
from tests.dflash_core.training.conftest import MakeJob, run_here


def of_target(job: TrainingJob, folder: Path) -> TrainingJob:
    return job.model_copy(update={"target": job.target.model_copy(update={"path": folder})})


def objective_of(job: TrainingJob) -> TargetObjective:
    with join_ranks(job.training) as ranks:
        return TargetObjective(job, TokenStore.open(job.store), None, ranks)


@pytest.fixture
def folder(parts: Path, tmp_path: Path) -> Path:
    """A target folder with config and tokenizer, and no weights."""
    without = shutil.ignore_patterns("*.safetensors")
    return Path(shutil.copytree(parts / "target", tmp_path / "target", ignore=without))


def edit_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_target_whose_documents_leak_is_not_trained_on_packed_rows(
    make_job: MakeJob, folder: Path, precision: str
) -> None:
    job = of_target(make_job(objective="target", strategy="packed", precision=precision), folder)
    objective_of(job)
    Qwen3_5TextConfig(
        vocab_size=384,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        architectures=[Qwen3_5ForCausalLM.__name__],
    ).save_pretrained(folder)
    with pytest.raises(
        ConfigError, match=r"Qwen3_5.* linear_attention .*batching\.strategy to sorted"
    ):
        objective_of(job)


def test_weights_that_are_no_safetensors_are_not_replaced_by_random_ones(
    make_job: MakeJob, parts: Path, folder: Path
) -> None:
    job = of_target(make_job(objective="target"), folder)
    objective_of(job)
    model = AutoModelForCausalLM.from_pretrained(parts / "target")
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(TargetError, match=r"holds pytorch_model\.bin but no \*\.safetensors"):
        objective_of(job)


@torch.no_grad()
def test_a_target_is_measured_without_dropout_and_trained_with_it(
    make_job: MakeJob, folder: Path
) -> None:
    edit_config(folder, attention_dropout=0.5)
    objective = objective_of(of_target(make_job(objective="target"), folder))
    micro_batch = MicroBatch([[0]], 192, 192, weight=1.0, epoch=0)
    batch, groups = objective.prepare(micro_batch), torch.zeros(1, dtype=torch.int64)

    def loss() -> float:
        return float(objective.run(micro_batch, batch, None, groups).sums[0])

    assert loss() == loss()
    with torch.enable_grad():
        assert loss() != loss()


def test_a_warm_start_of_another_shape_says_what_differs(make_job: MakeJob) -> None:
    first = make_job(epochs=1, max_steps=1, preflight=False)
    run_here(first)
    drafter = first.run_dir / "drafter"
    edit_config(drafter, max_position_embeddings=2048)
    job = make_job(name="warm").model_copy(update={"init_drafter": drafter})
    with pytest.raises(DraftError, match=r"max_position_embeddings is 2048, not 1024.*warm_start"):
        run_here(job)


@pytest.mark.parametrize("store", ["store", "held_out_store"])
@pytest.mark.parametrize(
    ("objective", "token", "sentence"),
    [
        ("draft", 5000, "holds token 5,000 but the target has 384 tokens"),
        ("target", 384, "holds token 384 but the target has 384 tokens"),
        ("draft", 3, r"holds token 3, which is .* mask token; set draft\.mask_token_id"),
    ],
)
def test_a_token_that_cannot_be_read_is_told_before_step_1(
    make_job: MakeJob, tmp_path: Path, store: str, objective: str, token: int, sentence: str
) -> None:
    job = make_job(objective=objective)
    samples = list(TokenStore.open(job.model_dump()[store]))
    odd = samples[-1]
    samples[-1] = replace(odd, input_ids=np.append(odd.input_ids[:-1], np.int32(token)))
    write_store(tmp_path / "odd", samples, batch_samples=7)
    job = job.model_copy(update={store: tmp_path / "odd"})
    with pytest.raises(DataError, match=f"sample {odd.sample_id} in .*/odd {sentence}"):
        run_here(job)
    assert not (job.run_dir / "metrics.jsonl").exists()
