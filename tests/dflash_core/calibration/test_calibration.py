import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_core.artifacts import content_digest
from dflash_core.calibration import program as calibration
from dflash_core.calibration import rehearsal
from dflash_core.calibration.rehearsal import pace_error, tempered, trimmed_ratio
from dflash_core.calibration.shapes import calibration_shapes
from dflash_core.calibration.transfer_timing import TOKENS, fit_transfer
from dflash_core.corpus.store import TokenStore
from dflash_core.errors import CalibrationError, TrainingError
from dflash_core.planning import BatchingConfig, num_anchors, plan_epoch
from dflash_core.throughput import CostModel, predict
from dflash_core.throughput.cost import TERMS
from dflash_core.training.memory import guard
from dflash_core.training.ranks.groups import join_ranks
from tests.dflash_core.throughput.machines import machine
from tests.dflash_core.training.conftest import status, write_job


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(calibration, "SECONDS", 0.0)
    monkeypatch.setattr(calibration, "ROUNDS", (1, 1))


AMOUNTS = {name: np.asarray(100.0) for name in TERMS}


def shapes(
    lengths, *, token_budget=1000, max_length: int | None = 1000, truncates=False, **more: Any
):
    config = BatchingConfig(
        token_budget=token_budget,
        max_length=max_length,
        oversize="truncate" if truncates else "error",
        **more,
    )
    lengths = np.array(lengths, dtype=np.int64)
    rng = np.random.default_rng(0)
    return calibration_shapes(lengths, config, supervised=lengths * 4 // 5, rng=rng)


def test_shapes_hold_the_budget_and_vary_rows_apart_from_length():
    lengths = np.random.default_rng(0).integers(20, 900, 300)
    found = shapes(lengths)
    assert all(len(s.micro_batch.rows) * s.micro_batch.padded_length <= 1000 for s in found)
    assert {len(s.micro_batch.rows) for s in found} >= {1, 2}
    assert len({s.cell for s in found}) * 2 == len(found)
    sizes = {(len(s.micro_batch.rows), s.micro_batch.padded_length) for s in found}
    assert len({length for _, length in sizes}) > 6


HEAVY = np.clip(np.random.default_rng(1).lognormal(6.9, 0.8, 5000).astype(int), 30, 16384)


def test_shapes_hold_the_anchors_and_samples_that_training_may():
    """What no micro-batch of the plan holds is neither needed nor timed."""
    limits: dict[str, Any] = {"token_budget": 49_152, "anchor_budget": 1024, "max_samples": 12}
    found = [s.micro_batch for s in shapes(HEAVY, max_length=None, **limits)]
    rule = BatchingConfig().anchors
    anchors = [int(num_anchors(HEAVY[batch.samples] * 4 // 5, rule).sum()) for batch in found]
    assert 800 < max(anchors) <= 1024
    assert {len(batch.rows) for batch in found} >= {1, 6, 12}


def test_the_grid_is_as_it_was_where_only_token_slots_are_limited():
    """The published accuracy was measured on it."""

    def described(**limits: Any):
        found = shapes(HEAVY, token_budget=49_152, max_length=None, **limits)
        return content_digest([[s.cell, s.micro_batch.rows, s.few_anchors] for s in found])

    assert described()[:16] == "a3bec5bfeb5f551c"
    assert described(anchor_budget=10**6, max_samples=10**6) == described()


def test_long_samples_are_cut_or_left_out_as_in_training():
    lengths = [5000] * 20 + [30] * 20
    cut = shapes(lengths, token_budget=600, max_length=500, truncates=True)
    assert max(s.micro_batch.padded_length for s in cut) == 500
    kept = shapes(lengths, token_budget=600, max_length=500)
    assert max(s.micro_batch.padded_length for s in kept) == 30


@pytest.mark.parametrize("lengths", [[], [0, 0], [2000, 3000]])
def test_nothing_to_time_is_refused(lengths):
    with pytest.raises(CalibrationError, match=f"none of {len(lengths)} samples can be timed"):
        shapes(lengths, max_length=10_000)


def test_the_spread_between_ranks_is_found_again():
    rng = np.random.default_rng(0)
    seconds = 1 + 0.05 * rng.standard_normal((4, 20_000))
    assert calibration._jitter(seconds) == pytest.approx(0.05, rel=0.03)
    assert calibration._jitter(seconds[:1]) == 0


def test_a_few_disturbed_steps_do_not_move_the_rehearsal():
    modelled = np.linspace(0.1, 0.3, 30)
    noise = 1 + 0.02 * np.random.default_rng(0).standard_normal(30)
    quiet, error = trimmed_ratio(1.1 * modelled * noise, modelled)
    assert quiet == pytest.approx(1.1, rel=0.01)
    assert 0.001 < error < 0.01
    noise[:5] *= 3
    disturbed, _ = trimmed_ratio(1.1 * modelled * noise, modelled)
    assert disturbed == pytest.approx(quiet, rel=0.01)


def test_a_pace_that_changes_over_seconds_makes_a_rehearsal_unsure():
    modelled = np.ones(50)
    noise = 1 + 0.1 * np.random.default_rng(0).standard_normal(50)
    slow_then_fast = np.where(np.arange(50) < 25, 1.2, 0.8)
    assert pace_error(noise, modelled, blocks=5) == pytest.approx(0.1 / math.sqrt(50), rel=0.6)
    assert pace_error(slow_then_fast, modelled, blocks=5) > 0.05


@pytest.mark.parametrize("steps", [1, 4])
def test_a_rehearsal_of_a_few_steps_says_nothing(steps):
    ratio, error = tempered(2.0, pace_error(np.full(steps, 2.0), np.ones(steps), blocks=5))
    assert ratio == pytest.approx(1.0, abs=1e-5)
    assert error == pytest.approx(0.05, rel=1e-3)


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8])
def test_sending_takes_what_ranks_with_a_partner_measured(num_ranks):
    few, many = TOKENS
    seconds = np.full((num_ranks, 2), [0.25 + few / 1024, 0.25 + many / 1024])
    if num_ranks % 2:
        seconds[-1] = 0.0
    assert fit_transfer(seconds) == pytest.approx((0.25, 1 / 1024))


def test_one_rank_sends_to_nobody():
    assert fit_transfer(np.zeros((1, 2))) == (0.0, 0.0)


@pytest.mark.parametrize("ratio", [0.7, 1.0, 1.3])
def test_an_unsure_rehearsal_counts_for_less(ratio):
    sure, unsure = tempered(ratio, 0.005), tempered(ratio, 0.2)
    assert sure[0] == pytest.approx(ratio, rel=0.01)
    assert abs(unsure[0] - 1) <= abs(ratio - 1) / 10
    assert sure[1] < unsure[1] < 0.05


@pytest.mark.usefixtures("quick")
def test_a_calibrated_machine_predicts_its_own_plans(make_job):
    job = make_job()
    with join_ranks(job.training) as ranks:
        model = calibration.calibrate(job, ranks)
    store = TokenStore.open(job.store)
    plan = plan_epoch(
        store.lengths, job.batching, epoch=0, seed=0, world_size=1, supervised=store.supervised
    )
    prediction = predict(plan, model, block_size=4)
    assert 0 < prediction.low < prediction.ktok_s < prediction.high
    assert model.correction > 0
    assert model.step_s > 0
    assert model.transfer_s_per_token == 0  # nobody to send to
    assert not (job.run_dir / "rehearsal").exists()
    model.require(calibration.fingerprint(job))


@pytest.mark.usefixtures("quick")
def test_reading_kept_features_is_timed_beside_the_target(make_job, tmp_path):
    cache = {"path": tmp_path / "features"}
    job = make_job(features="cache", cache=cache)
    with join_ranks(job.training) as ranks:
        model = calibration.calibrate(job, ranks)
    assert model.read is not None
    assert model.read.coefficients.seconds(AMOUNTS) > 0
    assert not list((tmp_path / "features").iterdir())  # what was kept for timing is gone
    model.require(calibration.fingerprint(job))
    with pytest.raises(CalibrationError, match="features 'cache' is not 'online'"):
        model.require(calibration.fingerprint(make_job()))


def test_runs_that_share_a_cache_folder_rehearse_apart(make_job, tmp_path, monkeypatch):
    features, used = tmp_path / "features", []

    def run_job(job, ranks):
        job.training.cache.path.mkdir(parents=True)
        used.append(job.training.cache.path)
        raise TrainingError("in the midst of it")

    monkeypatch.setattr(rehearsal, "run_job", run_job)
    for name in ("one", "other", "one"):
        job = make_job(name=name, features="cache", cache={"path": features})
        with join_ranks(job.training) as ranks, pytest.raises(TrainingError, match="midst"):
            rehearsal.rehearse(job, machine(), ranks, block_size=4)
    assert used[0] == used[2] != used[1]
    assert not list(features.iterdir())


@pytest.mark.usefixtures("quick")
def test_another_model_is_not_covered(make_job):
    job = make_job()
    marks = calibration.fingerprint(job)
    wider = job.model_copy(update={"draft": job.draft.model_copy(update={"num_layers": 2})})
    assert marks.differences(calibration.fingerprint(wider))


@pytest.mark.parametrize("spread", [False, pytest.param(True, marks=pytest.mark.integration)])
def test_two_ranks_calibrate_under_torchrun(make_job, tmp_path, spread):
    job = make_job(topology={"num_ranks": 2, "shard_trained": spread})
    out = tmp_path / "cost.json"
    done = start(job, out, tmp_path)
    assert done.returncode == 0, done.stdout
    model = CostModel.model_validate_json(out.read_bytes())
    assert model.fingerprint is not None
    assert model.fingerprint.num_ranks == 2
    assert model.fingerprint.shard_trained == spread
    assert model.transfer_latency_s + model.transfer_s_per_token > 0
    assert len(model.target.alternatives) > 5


def start(job, out, folder):
    file = folder / "job.json"
    file.write_text(job.model_dump_json())
    code = (
        "import sys; from dflash_core.calibration import program as calibration; "
        "calibration.SECONDS, calibration.ROUNDS = 0.0, (1, 1); sys.exit(calibration.main())"
    )
    script = folder / "quick.py"
    script.write_text(code)
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *(str(script), "--config", str(file), "--out", str(out)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )


def test_a_file_that_is_no_job_is_one_sentence(tmp_path, capsys):
    file = tmp_path / "job.json"
    file.write_text(json.dumps({"run_dir": "x"}))
    assert calibration.main(["--config", str(file), "--out", str(tmp_path / "o.json")]) == 2
    assert "is no training job" in capsys.readouterr().err
    assert not (tmp_path / "o.json").exists()


def test_a_cost_model_that_cannot_be_written_is_no_wrong_job(make_job, tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "calibrate", lambda job, ranks: machine())
    (tmp_path / "file").write_text("")
    job, out = make_job(), tmp_path / "file" / "cost.json"
    assert calibration.main(["--config", str(write_job(job)), "--out", str(out)]) == 1
    assert "FileExistsError" in str(status(job)["reason"])
    assert "no training job" not in str(status(job)["reason"])


def test_a_grid_that_memory_does_not_hold_is_refused_before_anything_is_timed(
    make_job, monkeypatch
):
    monkeypatch.setattr(guard, "memory_limit_bytes", lambda *_, **__: 10**6)
    monkeypatch.delattr(calibration._Bench, "measure")
    job = make_job()
    words = r"the micro-batch of .*, largest in .*a rank may use"
    with join_ranks(job.training) as ranks, pytest.raises(TrainingError, match=words):
        calibration.calibrate(job, ranks)


def test_an_empty_grid_is_refused_before_anything_is_timed(make_job):
    job = make_job()
    tiny = job.model_copy(
        update={"batching": BatchingConfig(token_budget=1, oversize="drop", max_length=None)}
    )
    with join_ranks(job.training) as ranks, pytest.raises(CalibrationError, match="can be timed"):
        calibration.calibrate(tiny, ranks)
