"""Cached features: exact, checked, refused, evicted; packed rows: as if apart, or refused."""

import multiprocessing
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_core.corpus.store import TokenStore
from dflash_core.errors import ConfigError
from dflash_core.target.config import TargetConfig
from dflash_core.target.loading import load_target
from dflash_core.training.batches.types import MicroBatch
from dflash_core.training.config import CacheConfig
from dflash_core.training.features.cache import FeatureCache, cache_bytes, make_room
from dflash_core.training.features.source import OnlineFeatures, check_packing
from dflash_core.training.objectives.drafter import DraftObjective
from dflash_core.training.program import run_fill
from dflash_core.training.ranks.groups import join_ranks
from dflash_core.training.ranks.stop import StopRequest
from tests.dflash_core.training.conftest import MakeJob, losses, run_here, run_ranks
from tests.tiny import TINY_LAYER_IDS

LENGTHS = np.array([5, 3, 9])
ALL = np.arange(3)
SHAPE = {"num_features": 4, "dtype": torch.bfloat16}


def open_cache(tmp_path, identity="a", *, lengths=LENGTHS, quota_gib=1.0) -> FeatureCache:
    config = CacheConfig(path=tmp_path, quota_gib=quota_gib)
    folder, *_ = make_room(config, [({"target": identity}, cache_bytes(lengths, **SHAPE))])
    return FeatureCache(folder, lengths, **SHAPE)


def test_what_was_written_is_read_by_another_process_view(tmp_path) -> None:
    wrote = [torch.randn(n - 1, 4, dtype=torch.bfloat16) for n in LENGTHS]
    cache = open_cache(tmp_path)
    assert cache.read(0, 1) is None
    for sample, features in enumerate(wrote):
        cache.write(sample, features)
    again = open_cache(tmp_path)
    assert again.is_complete(ALL)
    for sample, features in enumerate(wrote):
        found = again.read(sample, 2)
        assert found is not None
        assert torch.equal(found, features[:2])
    assert again.read(1, 3) is None  # more than is there


def test_a_damaged_sample_counts_as_absent(tmp_path) -> None:
    cache = open_cache(tmp_path)
    for sample, length in enumerate(LENGTHS):
        cache.write(sample, torch.ones(length - 1, 4, dtype=torch.bfloat16))
    file = next(tmp_path.glob("*/features-00000.bin"))
    data = bytearray(file.read_bytes())
    data[3] ^= 1
    file.write_bytes(data)
    again = open_cache(tmp_path)
    assert again.read(0, 4) is None
    assert again.read(1, 2) is not None
    assert not again.is_complete(ALL)
    assert again.is_complete(ALL[1:])


def test_another_targets_features_are_not_read(tmp_path) -> None:
    cache = open_cache(tmp_path)
    cache.write(0, torch.ones(4, 4, dtype=torch.bfloat16))
    assert open_cache(tmp_path, "b").read(0, 4) is None


def test_the_size_is_said_before_anything_is_written(tmp_path) -> None:
    """800,000 samples of 3,072 tokens, 5 layers of width 2,048 in bfloat16: 46 TiB."""
    lengths = np.full(800_000, 3072)
    size = cache_bytes(lengths, num_features=5 * 2048, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"take 46,8\d\d\.\d GiB, the quota is 100\.0 GiB"):
        make_room(CacheConfig(path=tmp_path / "no"), [({}, size)])
    assert not (tmp_path / "no").exists()


def test_the_longest_unused_cache_makes_room_and_one_in_use_stays(tmp_path) -> None:
    lengths = np.full(400, 33)
    size_gib = 400 * 32 * 8 / (1 << 30)
    for name in ("old", "new"):
        cache = open_cache(tmp_path, name, lengths=lengths)
        for sample in range(400):
            cache.write(sample, torch.ones(32, 4, dtype=torch.bfloat16))
        del cache
    held = open_cache(tmp_path, "old", lengths=lengths)  # used now, so "new" is the older one
    open_cache(tmp_path, "third", lengths=lengths, quota_gib=2.5 * size_gib)
    assert held.read(0, 1) is not None
    assert len(list(tmp_path.glob("[!.]*"))) == 2


def test_a_runs_caches_are_held_together_against_the_quota(tmp_path) -> None:
    lengths = np.full(400, 33)
    size = cache_bytes(lengths, **SHAPE)
    needs = [({"store": "train"}, size), ({"store": "held out"}, size // 2)]
    with pytest.raises(ConfigError, match="the quota is"):
        make_room(CacheConfig(path=tmp_path, quota_gib=1.4 * size / (1 << 30)), needs)
    config = CacheConfig(path=tmp_path, quota_gib=1.6 * size / (1 << 30))
    for _ in range(2):  # neither has to make room for the other
        for folder in make_room(config, needs):
            cache = FeatureCache(folder, lengths, **SHAPE)
            for sample in range(200):
                cache.write(sample, torch.ones(32, 4, dtype=torch.bfloat16))


def make_room_often(folder: Path) -> None:
    for _ in range(20):
        make_room(CacheConfig(path=folder), [({"store": name}, 100) for name in "ab"])


def test_ranks_and_runs_that_make_room_at_once_do_not_disturb_each_other(tmp_path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=make_room_often, args=(tmp_path,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4


def test_a_disk_that_is_too_small_is_said_before_anything_is_captured(tmp_path) -> None:
    config = CacheConfig(path=tmp_path, quota_gib=1e9)
    need = shutil.disk_usage(tmp_path).total + (1 << 30)
    with pytest.raises(ConfigError, match=r"GiB left; make room there, or set training\.cache\."):
        make_room(config, [({}, need)])


FILLER = """
import sys
from pathlib import Path
import numpy as np, torch
from dflash_core.training.config import CacheConfig
from dflash_core.training.features.cache import FeatureCache, make_room
shape = {"num_features": 64, "dtype": torch.float32}
lengths = np.full(100, 100)
folder, = make_room(CacheConfig(path=Path(sys.argv[1])), [({}, 0)])
cache = FeatureCache(folder, lengths, **shape)
try:
    for sample in range(100):
        cache.write(sample, torch.ones(99, 64))
except OSError as error:
    print(error, sample > 30, cache.read(0, 99) is not None, cache.read(sample, 1) is None)
"""


def test_a_disk_that_becomes_full_is_an_error_and_no_signal(tmp_path) -> None:
    """2.5 MB of features on a disk of 1 MiB, which only a mount namespace has."""
    own = ["unshare", "--map-root-user", "--mount"]
    mount = ["sh", "-c", 'mount -t tmpfs -o size=1m none "$1" && shift && exec "$@"', "sh"]
    if subprocess.run([*own, *mount, str(tmp_path), "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    command = [*own, *mount, str(tmp_path), sys.executable, "-c", FILLER, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.stdout == "[Errno 28] No space left on device True True True\n", found.stderr


def test_losses_are_those_of_an_online_run(make_job: MakeJob, tmp_path, monkeypatch) -> None:
    """Bit for bit in the epoch that wrote the cache, within 1e-5 where batches were re-drawn."""
    online = make_job(name="online")
    run_here(online)
    settings = {"features": "cache", "cache": {"path": tmp_path / "cache"}}
    writing = make_job(name="writing", **settings)
    run_here(writing)
    half = len(losses(online)) // 2
    assert losses(writing)[:half] == losses(online)[:half]
    assert losses(writing) == pytest.approx(losses(online), rel=1e-5)

    def refuse(*_: object) -> None:
        raise AssertionError("the target was run")

    monkeypatch.setattr(OnlineFeatures, "rows", refuse)
    reading = make_job(name="reading", **settings)
    run_here(reading)
    assert losses(reading) == pytest.approx(losses(online), rel=1e-5)


def test_a_filled_cache_leaves_the_target_nothing_to_do(
    make_job: MakeJob, tmp_path, monkeypatch
) -> None:
    """Two ranks fill it; the first epoch's losses are an online run's bit for bit."""
    online = make_job(name="online", validation={"every_steps": 2})
    run_here(online)
    settings = {"features": "cache", "cache": {"path": tmp_path / "cache"}}
    assert run_ranks(make_job(name="filling", num_ranks=2, **settings), "--only-features") == [0, 0]
    told = (tmp_path / "filling" / "rank-0.log").read_text()
    assert "features of 40 samples take up to 0.00 GiB of 100.00 GiB" in told

    def refuse(*_: object) -> None:
        raise AssertionError("the target was run")

    reading = make_job(name="reading", **settings, validation={"every_steps": 2})
    with monkeypatch.context() as patch:
        patch.setattr(OnlineFeatures, "rows", refuse)
        run_here(reading)
    half = len(losses(online)) // 2
    assert losses(reading)[:half] == losses(online)[:half]
    _damage(tmp_path / "cache")
    again = make_job(name="again", **settings)
    run_here(again)  # the damaged sample is captured anew
    assert losses(again) == pytest.approx(losses(online), rel=1e-5)


@pytest.mark.parametrize(
    ("batching", "training"),
    [
        ({"max_length": 150, "oversize": "drop"}, {}),
        ({}, {"validation": {"every_steps": 2, "num_samples": 8}}),
        ({}, {"max_steps": 1}),
    ],
)
def test_only_what_a_run_reads_has_to_be_there(
    make_job: MakeJob, tmp_path, monkeypatch, batching, training
) -> None:
    """Samples that the plan drops, or that no measurement reads, load no target."""
    settings = {"features": "cache", "cache": {"path": tmp_path}, "preflight": False, **training}
    job = make_job(epochs=1, **settings)
    job = job.model_copy(update={"batching": job.batching.model_copy(update=batching)})
    run_here(job)
    loaded = []

    def load(*given, layers=True, **more):
        loaded.append(layers)
        return load_target(*given, layers=layers, **more)

    monkeypatch.setattr("dflash_core.training.roles.load_target", load)
    run_here(job.model_copy(update={"run_dir": tmp_path / "again"}))
    assert not any(loaded)


def _damage(folder: Path) -> None:
    for file in folder.glob("*/features-00000.bin"):
        data = bytearray(file.read_bytes())
        data[3] ^= 255
        file.write_bytes(data)


def test_only_a_run_that_keeps_features_can_fill_a_cache(make_job: MakeJob) -> None:
    job = make_job()
    with join_ranks(job.training) as ranks, pytest.raises(ConfigError, match="is 'online'"):
        run_fill(job, ranks, StopRequest())


def test_packed_documents_are_trained_on_as_if_apart(make_job: MakeJob, parts) -> None:
    """Another padding sums attention in another order: 1e-5 in float32."""
    job = make_job()
    target = load_target(TargetConfig(path=parts / "target", layer_ids=TINY_LAYER_IDS))
    objective = DraftObjective(job, target, TokenStore.open(parts / "store"), None)
    groups = torch.zeros(3, dtype=torch.int64)
    found = []
    for rows, length in (([[0], [1], [2]], 192), ([[0, 1, 2]], 600)):
        micro_batch = MicroBatch(rows, length, 192, weight=1.0, epoch=0)
        batch = objective.prepare(micro_batch)
        features_MF = OnlineFeatures(target, packed=len(rows) == 1)(micro_batch, batch)
        objective.module.zero_grad()
        found.append(objective.run(micro_batch, batch, features_MF, groups).by_sample)
    assert torch.allclose(*found, rtol=1e-5)


def test_a_target_that_sees_across_documents_is_refused(parts) -> None:
    target = load_target(TargetConfig(path=parts / "target", layer_ids=TINY_LAYER_IDS))
    check_packing(target)

    class Leaky(type(target)):
        def features(self, input_ids_BT, attention_mask_BT=None, position_ids_BT=None):
            return self.input_embeddings(input_ids_BT).cumsum(1)

    leaky = Leaky(target.model, target.tokenizer, target.layer_ids)
    with pytest.raises(ConfigError, match="sorted, random, bucketed or pooled"):
        check_packing(leaky)
