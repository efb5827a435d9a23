import json

import pytest
import torch

from dflash_core.corpus.store import TokenStore
from dflash_core.errors import TrainingError
from dflash_core.throughput import worst_micro_batches
from dflash_core.training.batches.schedule import Epochs
from dflash_core.training.memory import guard
from dflash_core.training.memory.preflight import MemoryReport, preflight
from dflash_core.training.memory.usage import used_memory_bytes
from dflash_core.training.program import run_job
from dflash_core.training.ranks.groups import Ranks, join_ranks
from dflash_core.training.trainer import MEMORY_NAME
from tests.dflash_core.training.conftest import start_ranks
from tests.tiny import TINY_LAYER_IDS

CPU = torch.device("cpu")


def losses(job):
    lines = (job.run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_the_report_tells_headroom_and_what_a_cache_would_take(make_job):
    job = make_job(max_steps=1)
    with join_ranks(job.training) as ranks:
        run_job(job, ranks)
    report = MemoryReport.model_validate_json((job.run_dir / MEMORY_NAME).read_bytes())
    store, width = TokenStore.open(job.store), 32 * len(TINY_LAYER_IDS)
    assert report.cache_bytes == int((store.lengths - 1).sum()) * width * 4
    assert 0 < report.headroom < 1
    assert f"a feature cache would take {report.cache_bytes / 2**30:,.2f} GiB" in str(report)


def test_the_worst_micro_batches_are_run_in_part_and_whole(make_job):
    job = make_job()
    epochs = Epochs(job, TokenStore.open(job.store), None)
    ran = []
    with join_ranks(job.training) as ranks:
        report = preflight(epochs, lambda batch: ran.append(batch), ranks)
    plan = epochs.plan(0)
    worst = worst_micro_batches(
        rows=plan.rows, padded_lengths=plan.padded_lengths, num_anchors=plan.num_anchors
    )
    whole = [epochs.micro_batch(0, index) for index in worst]
    assert [batch for batch in whole if batch not in ran] == []
    assert len(report.worst) == len(worst)
    assert 0 < report.peak_bytes < report.limit_bytes
    assert "headroom" in str(report)


def test_ranks_meet_after_every_part(make_job, monkeypatch):
    """A slower role's whole pre-flight is no single wait."""
    job = make_job()
    epochs = Epochs(job, TokenStore.open(job.store), None)
    done = []
    monkeypatch.setattr(Ranks, "meet", lambda self, *, what: done.append(what))
    with join_ranks(job.training) as ranks:
        preflight(epochs, lambda batch: done.append("ran"), ranks)
    assert done == ["ran", "the pre-flight"] * (len(done) // 2)
    assert len(done) > 8


def test_training_learns_the_same_with_and_without_it(make_job):
    found = {}
    for flag in (True, False):
        job = make_job(name=f"run-{flag}", preflight=flag, max_steps=3)
        with join_ranks(job.training) as ranks:
            run_job(job, ranks)
        found[flag] = losses(job)
        assert (job.run_dir / MEMORY_NAME).is_file() == flag
    assert found[True] == found[False]


def test_models_that_leave_no_memory_at_all_are_told_so(make_job, monkeypatch):
    job = make_job()
    epochs = Epochs(job, TokenStore.open(job.store), None)
    monkeypatch.setattr(guard, "memory_limit_bytes", lambda *_, **__: used_memory_bytes(CPU) // 2)
    words = r"before the micro-batch of .* run fewer ranks"
    with join_ranks(job.training) as ranks, pytest.raises(TrainingError, match=words):
        preflight(epochs, lambda batch: None, ranks)


@pytest.mark.parametrize("strategy", ["random", "packed"])
@pytest.mark.parametrize("features", ["online", "cache"])
def test_a_whole_run_is_tried_out_in_parts_of_real_samples(make_job, tmp_path, strategy, features):
    cache = {"path": tmp_path / "features"}
    job = make_job(strategy=strategy, features=features, cache=cache, max_steps=2)
    plain = job.training.model_copy(update={"preflight": False})
    without = job.model_copy(update={"run_dir": tmp_path / "without", "training": plain})
    for each in (job, without):
        with join_ranks(each.training) as ranks:
            run_job(each, ranks)
    assert losses(job) == losses(without)


def test_target_and_drafter_ranks_fly_together(make_job):
    topology = {"kind": "disaggregated", "num_ranks": 2, "num_target_ranks": 1}
    job = make_job(topology=topology, max_steps=2)
    process = start_ranks(job)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert "pre-flight" in output
