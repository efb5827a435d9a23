"""What is trained may be spread over the ranks that train it, and nothing else changes."""

import json
import multiprocessing
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash_core.artifacts import MANIFEST_NAME
from dflash_core.corpus.store import TokenStore, write_store
from dflash_core.training.checkpoint import load_checkpoint
from dflash_core.training.config import TopologyConfig, TrainingJob
from dflash_core.training.flat import FlatGradients
from dflash_core.training.objectives.target import TargetObjective
from dflash_core.training.ranks.fsdp import whole
from dflash_core.training.ranks.groups import join_ranks
from dflash_core.training.telemetry.validation import Validation
from dflash_core.training.trainer import Trainer
from tests.dflash_core.training.conftest import (
    MakeJob,
    finish,
    free_port,
    losses,
    read_steps,
    run_here,
    run_ranks,
    status,
)

# Steps of 4 micro-batches leave some of 3 ranks without one in a round. Float32 gradients are
# summed in another order than on one rank: 1e-5 after a handful of steps.
SHAPE = {
    "token_budget": 512,
    "micro_batches_per_step": 4,
    "validation": {"every_steps": 3, "num_samples": 9},
}
TOLERANCE = 1e-5
OBJECTIVES = ["draft", pytest.param("target", marks=pytest.mark.integration)]


def over(num_ranks: int, num_target_ranks: int = 0, **more: bool) -> TopologyConfig:
    return TopologyConfig(
        kind="disaggregated" if num_target_ranks else "colocated",
        num_ranks=num_ranks,
        num_target_ranks=max(num_target_ranks, 1),
        **{"shard_trained": True, **more},
    )


def checkpoint(job: TrainingJob, step: int) -> dict:
    return load_checkpoint(job.run_dir / "checkpoints" / f"step-{step:08d}")


def trained(job: TrainingJob) -> dict[str, Tensor]:
    """Return the weights of the best step, which are exported in bfloat16, in float32."""
    manifest = json.loads((job.run_dir / "drafter" / MANIFEST_NAME).read_bytes())
    return checkpoint(job, manifest["metadata"]["step"])["module"]


def tensors(state: object) -> list[Tensor]:
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in tensors(value)]
    return [state] if isinstance(state, Tensor) else []


@pytest.mark.parametrize(
    "topology",
    [
        over(3, shard_target=True),
        over(3, 1),
        pytest.param(over(2), marks=pytest.mark.integration),
        pytest.param(over(5, 2, shard_target=True), marks=pytest.mark.integration),
    ],
)
def test_a_spread_drafter_learns_the_same(make_job: MakeJob, topology: TopologyConfig) -> None:
    alone = make_job(name="alone", **SHAPE)
    run_here(alone)
    job = make_job(name="spread", **SHAPE, topology=topology)
    assert run_ranks(job) == [0] * topology.num_ranks
    assert losses(job) == pytest.approx(losses(alone), rel=TOLERANCE)
    torch.testing.assert_close(trained(job), trained(alone), rtol=0, atol=1e-4)


@pytest.mark.parametrize("num_ranks", [3, pytest.param(2, marks=pytest.mark.integration)])
def test_a_spread_target_learns_the_same_and_goes_on_whole(
    make_job: MakeJob, num_ranks: int
) -> None:
    """Whole to spread and back, on other ranks: a checkpoint does not know who wrote it."""
    shape = {**SHAPE, "objective": "target", "keep_checkpoints": 9}
    alone = make_job(name="alone", **shape)
    run_here(alone)
    job = make_job(name="spread", **shape, topology=over(num_ranks))
    assert run_ranks(job) == [0] * num_ranks
    assert losses(job) == pytest.approx(losses(alone), rel=TOLERANCE)
    for one, other in zip(*(tensors(checkpoint(each, 3)) for each in (alone, job)), strict=True):
        assert one.shape == other.shape
    moved = make_job(name="moved", **shape)
    _keep_first_checkpoint(job, moved)
    run_here(moved)
    assert losses(moved) == pytest.approx(losses(alone), rel=TOLERANCE)
    saved = [load_file(each.run_dir / "target" / "model.safetensors") for each in (alone, job)]
    assert saved[0].keys() == saved[1].keys()
    for name, tensor in saved[0].items():
        torch.testing.assert_close(saved[1][name], tensor, rtol=2**-7, atol=1e-4)


def _keep_first_checkpoint(source: TrainingJob, moved: TrainingJob) -> None:
    shutil.copytree(source.run_dir, moved.run_dir)
    for late in sorted((moved.run_dir / "checkpoints").iterdir())[1:]:
        shutil.rmtree(late)


def test_micro_batches_without_anchors_keep_step(make_job: MakeJob, tmp_path: Path) -> None:
    """They have nothing to learn from, but the drafter's layers must still be gathered."""
    job = make_job(name="alone", **SHAPE | {"validation": {}}, num_ranks=1)
    samples = list(TokenStore.open(job.store))[:12]
    mute = [replace(s, loss_mask=np.arange(len(s.loss_mask)) == 1) for s in samples[::2]]
    write_store(tmp_path / "store", samples[1::2] + mute)
    batching = job.batching.model_copy(update={"max_samples": 1})
    alone = job.model_copy(update={"store": tmp_path / "store", "batching": batching})
    run_here(alone)
    assert sum(step["samples_without_anchors"] for step in read_steps(alone)) > 6
    training = job.training.model_copy(update={"topology": over(2)})
    spread = alone.model_copy(update={"run_dir": tmp_path / "spread", "training": training})
    assert run_ranks(spread) == [0, 0]
    assert losses(spread) == pytest.approx(losses(alone), rel=TOLERANCE)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_spread_run_resumes_bit_for_bit(make_job: MakeJob, objective: str) -> None:
    shape = {**SHAPE, "objective": objective, "keep_checkpoints": 9, "topology": over(2)}
    whole_run = make_job(name="whole", **shape)
    assert run_ranks(whole_run) == [0, 0]
    cut = make_job(name="cut", **shape)
    _keep_first_checkpoint(whole_run, cut)
    assert run_ranks(cut) == [0, 0]
    assert losses(cut) == losses(whole_run)


@pytest.mark.integration
@pytest.mark.parametrize("begin", ["target", "drafter"])
def test_a_spread_drafter_begins_with_given_weights(make_job: MakeJob, begin: str) -> None:
    first = make_job(name="first", **SHAPE, max_steps=2)
    run_here(first)
    found = []
    for name, topology in (("alone", over(1)), ("spread", over(2))):
        job = make_job(name=name, **SHAPE, max_steps=2, topology=topology)
        draft = job.draft.model_copy(update={"initial_weights": "target"})
        drafter = {"init_drafter": first.run_dir / "drafter"}
        job = job.model_copy(update=drafter if begin == "drafter" else {"draft": draft})
        assert run_ranks(job) == [0] * topology.num_ranks
        found.append(losses(job))
    assert found[1] == pytest.approx(found[0], rel=TOLERANCE)
    assert found[0] != pytest.approx(losses(first), rel=TOLERANCE)


def test_acceptance_is_measured_and_decides(make_job: MakeJob) -> None:
    found = []
    for name, topology in (("alone", over(1)), ("spread", over(2))):
        validation = {"every_steps": 3, "accept_every_steps": 3, "num_samples": 9}
        validation |= {"num_prompts": 2, "max_new_tokens": 8}
        job = make_job(name=name, **(SHAPE | {"validation": validation}), topology=topology)
        assert run_ranks(job) == [0] * topology.num_ranks
        found.append(trained(job))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_gathered_bfloat16_trains_to_its_own_rounding(make_job: MakeJob, objective: str) -> None:
    shape = {**SHAPE, "objective": objective, "precision": "bfloat16", "max_steps": 4}
    alone = make_job(name="alone", **shape)
    run_here(alone)
    job = make_job(name="spread", **shape, topology=over(2))
    assert run_ranks(job) == [0, 0]
    assert losses(job) == pytest.approx(losses(alone), rel=2e-2)


@pytest.mark.parametrize(
    ("owner", "work"),
    [
        (Trainer, "_learn"),
        (FlatGradients, "normalise"),
        (Validation, "measure"),
        (Trainer, "_weights"),
    ],
)
def test_a_lost_peer_is_named_by_who_waited_for_it(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, owner: type, work: str
) -> None:
    """Whatever the ranks were about to do together: learn, clip, measure or save."""
    do = getattr(owner, work)

    def die_on_one(*arguments: object, **more: object) -> object:
        if os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return do(*arguments, **more)

    monkeypatch.setattr(owner, work, die_on_one)
    job = make_job(topology=over(2), preflight=False, **SHAPE)
    assert run_ranks(job) == [1, -signal.SIGKILL]
    assert status(job)["state"] == "failed"
    assert "rank 0 waited" in str(status(job)["reason"])


def test_each_rank_holds_its_share_and_clips_by_the_norm_of_all(
    make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job(objective="target", topology=over(2))
    context = multiprocessing.get_context("fork")
    port = free_port()
    ranks = [context.Process(target=_look_at_shares, args=(job, r, port)) for r in range(2)]
    for process in ranks:
        process.start()
    assert finish(ranks) == [0, 0]  # pyright: ignore[reportArgumentType]
    (gathered, norm), (nothing, other_norm) = (torch.load(tmp_path / f"{r}.pt") for r in range(2))
    assert norm == other_norm == pytest.approx(5.0 / 2)
    assert all(tensor is None for tensor in nothing.values())
    assert all(type(tensor) is Tensor for tensor in gathered.values())


def _look_at_shares(job: TrainingJob, rank: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with join_ranks(job.training) as ranks:
        module = TargetObjective(job, TokenStore.open(job.store), None, ranks).module
        parameters = list(module.parameters())
        gradients = FlatGradients(parameters)
        total = sum(parameter.numel() for parameter in parameters)
        assert 0.4 * total < len(gradients.buffer) < 0.6 * total
        gradients.buffer[0] = (3.0, 4.0)[rank]
        norm = gradients.normalise(2.0, 1.0)
        torch.testing.assert_close(float(gradients.buffer[0]), (0.6, 0.8)[rank])
        state = whole(module.state_dict(keep_vars=True), keep=ranks.is_first)
        torch.save((state, norm), job.run_dir.parent / f"{rank}.pt")
        ranks.meet(what="the end")
    os._exit(0)
