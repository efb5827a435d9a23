"""Held-out measurements, the best checkpoint, the early end; ranks with nothing or damaged data."""

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dflash_core.corpus.store import TokenStore, write_store
from dflash_core.decoding.speculative import _Batch
from dflash_core.errors import ConfigError
from dflash_core.training.checkpoint import checkpoint_path, load_checkpoint
from dflash_core.training.config import TrainingJob
from dflash_core.training.objectives.drafter import DraftObjective
from dflash_core.training.program import run_job
from dflash_core.training.ranks.groups import join_ranks
from dflash_core.training.telemetry.validation import Validation
from tests.dflash_core.training.conftest import (
    FullDisk,
    MakeJob,
    read_steps,
    run_here,
    run_ranks,
    status,
)
from tests.tiny import tiny_family

FAST = {"learning_rate": 1e-2, "warmup_ratio": 0.0}


def test_measurements_come_when_due_and_are_the_same_on_any_ranks(make_job: MakeJob) -> None:
    settings = {"validation": {"every_steps": 3}, "optimizer": FAST}
    alone = make_job(name="alone", **settings)
    run_here(alone)
    measured = [step for step in read_steps(alone) if "held_out_loss" in step]
    assert [step["step"] for step in measured] == [3, 6, 8]
    shared = make_job(name="shared", num_ranks=3, num_target_ranks=1, **settings)
    assert run_ranks(shared) == [0, 0, 0]
    again = [step for step in read_steps(shared) if "held_out_loss" in step]
    for one, other in zip(measured, again, strict=True):
        assert one["held_out_loss"] == pytest.approx(other["held_out_loss"], rel=1e-5)
        assert one["forgotten_groups"] == other["forgotten_groups"]


def test_real_acceptance_is_measured_and_the_best_drafter_is_exported(make_job: MakeJob) -> None:
    validation = {"every_steps": 2, "accept_every_steps": 4, "max_new_tokens": 8, "num_prompts": 2}
    job = make_job(validation=validation, keep_checkpoints=1)
    run_here(job)
    steps = {step["step"]: step for step in read_steps(job)}
    taus = {number: step.get("held_out_acceptance") for number, step in steps.items()}
    assert [number for number, tau in taus.items() if tau is not None] == [4, 8]
    best = max((4, 8), key=lambda number: (taus[number], number))
    _assert_exported(job, best)


def test_acceptance_of_a_target_with_running_states_is_measured_text_by_text(
    make_job: MakeJob, tmp_path: Path
) -> None:
    kinds = ["conv", "full_attention"] * 2
    path = tiny_family(tmp_path / "lfm2", "lfm2", layer_types=kinds)
    validation = {"every_steps": 1, "accept_every_steps": 1, "max_new_tokens": 4, "num_prompts": 2}
    job = make_job(validation=validation, max_steps=1)
    target = job.target.model_copy(update={"path": path})
    run_here(job.model_copy(update={"target": target}))
    assert read_steps(job)[0]["held_out_acceptance"] >= 1


def test_decoding_for_longer_than_the_timeout_ends_no_run(make_job: MakeJob, monkeypatch) -> None:
    """Other ranks wait as long as the decoding one gives signs of life."""
    quick = _Batch._round
    monkeypatch.setattr(_Batch, "_round", lambda *given: (time.sleep(1.5), quick(*given)))
    validation = {"every_steps": 2, "accept_every_steps": 2, "max_new_tokens": 12, "num_prompts": 2}
    job = make_job(num_ranks=2, max_steps=2, timeout_s=8.0, preflight=False, validation=validation)
    begin = time.monotonic()
    assert run_ranks(job) == [0, 0], status(job)["reason"]
    assert time.monotonic() - begin > 8 and read_steps(job)[1]["held_out_acceptance"] < 2
    assert "still at the acceptance after step 2" in (job.run_dir / "rank-0.log").read_text()


def test_what_was_decoded_once_is_kept_even_if_it_was_better_before(
    make_job: MakeJob, monkeypatch
) -> None:
    measure = Validation.measure

    def worse(self, step, works, pipeline):
        return replace(measure(self, step, works, pipeline), score=-float(step))

    monkeypatch.setattr(Validation, "measure", worse)
    validation = {"every_steps": 4, "accept_every_steps": 4, "max_new_tokens": 4, "num_prompts": 1}
    job = make_job(epochs=3, checkpoint_every_steps=100, keep_checkpoints=9, validation=validation)
    run_here(job)
    kept = sorted(path.name for path in (job.run_dir / "checkpoints").glob("step-*"))
    assert kept == ["step-00000004", "step-00000008", "step-00000012"]


def _assert_exported(job: TrainingJob, step: int) -> None:
    stored = load_checkpoint(checkpoint_path(job.run_dir / "checkpoints", step))
    exported = load_file(job.run_dir / "drafter" / "model.safetensors")
    assert all(
        torch.equal(tensor.float(), stored["module"][name].to(tensor.dtype).float())
        for name, tensor in exported.items()
    )


def test_of_equal_measurements_the_last_is_exported_and_none_is_a_gain(
    make_job: MakeJob, monkeypatch
) -> None:
    monkeypatch.setattr(DraftObjective, "score", lambda *_: 1.0)
    job = make_job(epochs=4, preflight=False, validation={"every_steps": 2, "patience": 2})
    run_here(job)
    assert str(status(job)["reason"]) == "no gain in 2 measurements; the best was at step 6"
    _assert_exported(job, 6)


@pytest.mark.parametrize(("full", "kept"), [(2, 4), (4, 2)])
def test_a_best_step_that_was_not_kept_is_not_exported(
    make_job: MakeJob, monkeypatch, full: int, kept: int
) -> None:
    """The disk is full at the best step, which is the first or has another one before it."""
    scores = {2: 1.6 if full == 2 else 1.5, 4: 1.5 if full == 2 else 1.6, 6: 1.1, 8: 1.1}
    measure = Validation.measure

    def scripted(self, step, works, pipeline):
        return replace(measure(self, step, works, pipeline), score=scores[step + 1])

    monkeypatch.setattr(Validation, "measure", scripted)
    job = make_job(optimizer=FAST, validation={"every_steps": 2}, preflight=False)
    with join_ranks(job.training) as ranks:
        run_job(job, ranks, FullDisk(range(full, full + 1)))
    manifest = json.loads((job.run_dir / "drafter" / "manifest.json").read_text())
    assert manifest["metadata"]["step"] == kept
    _assert_exported(job, kept)


def test_a_run_without_gain_ends_early(make_job: MakeJob) -> None:
    """A rate that destroys the drafter: the first measurement stays the best."""
    job = make_job(
        epochs=20,
        optimizer={"learning_rate": 10.0, "warmup_ratio": 0.0, "grad_clip": 1e9},
        validation={"every_steps": 1, "patience": 3},
    )
    run_here(job)
    assert status(job)["state"] == "finished"
    assert len(read_steps(job)) < 20
    assert "no gain in 3 measurements" in str(status(job)["reason"])
    steps, exported = read_steps(job), (job.run_dir / "drafter" / "model.safetensors").read_bytes()
    run_here(job)  # as after a failure behind training
    assert read_steps(job) == steps
    assert (job.run_dir / "drafter" / "model.safetensors").read_bytes() == exported


def test_patience_without_measurements_is_refused(make_job: MakeJob) -> None:
    with pytest.raises(ValueError, match=r"set validation\.every_steps"):
        make_job(validation={"patience": 2})


def test_measuring_needs_a_held_out_store(make_job: MakeJob) -> None:
    job = make_job(validation={"every_steps": 2}).model_copy(update={"held_out_store": None})
    with pytest.raises(ConfigError, match="set held_out_store"):
        run_here(job)


@pytest.mark.parametrize(
    ("supervised", "objective", "settings", "words"),
    [
        (0.0, "draft", {}, "has two supervised tokens in a row among its first 1,024;"),
        (0.0, "target", {}, "has any supervised tokens among its first 1,024;"),
        (0.0, "draft", {"accept_every_steps": 2}, "every_steps is 2, but none of the 16 held-out"),
        (1.0, "draft", {"accept_every_steps": 2}, "2 held-out samples that are decoded begins"),
    ],
)
def test_held_out_samples_that_measure_nothing_are_refused_before_the_first_step(
    make_job: MakeJob, parts, tmp_path, supervised, objective, settings, words
) -> None:
    samples = [
        replace(sample, loss_mask=np.full_like(sample.loss_mask, supervised))
        for sample in TokenStore.open(parts / "held_out")
    ]
    write_store(tmp_path / "held_out", samples)
    validation = {"every_steps": 2, "num_prompts": 2, **settings}
    job = make_job(objective=objective, validation=validation)
    with pytest.raises(ConfigError, match=words):
        run_here(job.model_copy(update={"held_out_store": tmp_path / "held_out"}))
    assert not (job.run_dir / "metrics.jsonl").exists()


def test_ranks_without_anchors_neither_hang_nor_count(make_job: MakeJob, parts, tmp_path) -> None:
    samples = [
        replace(sample, loss_mask=np.zeros_like(sample.loss_mask)) if index % 3 else sample
        for index, sample in enumerate(TokenStore.open(parts / "store"))
    ]
    write_store(tmp_path / "bare", samples)
    job = make_job(
        num_ranks=3, num_target_ranks=1, strategy="sorted", token_budget=192, epochs=1
    ).model_copy(update={"store": tmp_path / "bare"})
    assert run_ranks(job) == [0, 0, 0]
    steps = read_steps(job)
    assert any(step["num_anchors"] == 0 for step in steps)
    assert sum(step["samples_without_anchors"] for step in steps) >= 26


def test_a_sample_that_one_rank_cannot_use_stops_all_with_its_sentence(
    make_job: MakeJob, parts, tmp_path
) -> None:
    from dflash_core.draft.build import draft_spec
    from dflash_core.target.loading import load_target

    job = make_job(num_ranks=2)
    mask_token = draft_spec(job.draft, load_target(job.target)).mask_token_id
    samples = list(TokenStore.open(parts / "store"))
    samples[7] = replace(samples[7], input_ids=np.full_like(samples[7].input_ids, mask_token))
    write_store(tmp_path / "masked", samples)
    job = job.model_copy(update={"store": tmp_path / "masked"})
    codes = run_ranks(job)
    assert all(codes)
    assert samples[7].sample_id in str(status(job)["reason"])
