"""Real allocations under a limit that is set for the test."""

import numpy as np
import pytest
import torch

from dflash_core.errors import TrainingError
from dflash_core.training.batches.types import MicroBatch
from dflash_core.training.memory.guard import MemoryGuard, expected_growth, parts_of
from dflash_core.training.memory.usage import used_memory_bytes

CPU = torch.device("cpu")
MIB = 2**20


def batch_of(*, rows=1, documents=1, length=64):
    return MicroBatch(
        rows=[list(range(documents)) for _ in range(rows)],
        padded_length=length,
        max_length=length,
        weight=1.0,
        epoch=0,
    )


def guard_with(mebibytes, *, token_budget=4096):
    """Return a guard that leaves so much beside what is used now."""
    limit = int((used_memory_bytes(CPU) + mebibytes * MIB) / 0.95)
    return MemoryGuard(CPU, limit_bytes=limit, token_budget=token_budget)


def per_row(micro_batch):
    torch.ones(len(micro_batch.rows) * 20 * MIB // 4).add_(1)


def per_slot(micro_batch):
    slots = len(micro_batch.rows) * micro_batch.padded_length
    torch.ones(slots * MIB // 4).add_(1)


def per_square(micro_batch):
    """256 MiB for 64 slots, 4 for 8."""
    torch.ones(micro_batch.padded_length**2 * MIB // 64).add_(1)


def test_what_ran_before_does_not_count_for_what_comes_next():
    guard = guard_with(400)
    guard.run(batch_of(rows=16), per_row, "the larger")
    guard.run(batch_of(rows=12), per_row, "the smaller")
    guard.run(batch_of(rows=16), lambda _: None, "nothing at all")


def test_a_peak_of_loading_does_not_count():
    torch.ones(400 * MIB // 4).add_(1)
    guard_with(100).run(batch_of(rows=16), lambda _: None, "nothing at all")


@pytest.mark.parametrize(
    ("micro_batch", "run"),
    [
        (batch_of(rows=16), per_row),
        (batch_of(documents=4, length=320), per_slot),  # a packed row
        (batch_of(length=320), per_slot),
    ],
)
def test_what_would_not_fit_is_refused_before_it_is_run_whole(micro_batch, run):
    ran = []
    guard = guard_with(200)
    words = r"largest needs about .* set batching\.token_budget to at most [12],\d\d\d"
    with pytest.raises(TrainingError, match=words):
        guard.run(micro_batch, lambda part: (ran.append(part), run(part))[1], "largest")
    assert ran and micro_batch not in ran
    guard_with(450).run(micro_batch, run, "with more memory")


def test_what_grows_with_the_square_of_the_length_is_refused_in_time():
    ran = []
    guard = guard_with(150)
    with pytest.raises(TrainingError, match=r"batching\.token_budget"):
        guard.run(batch_of(), lambda part: (ran.append(part), per_square(part))[1], "a long row")
    assert max(part.padded_length for part in ran) == 32
    guard_with(300).run(batch_of(), per_square, "with more memory")


def test_what_stays_after_the_first_run_is_counted_once():
    kept = []

    def run(micro_batch):
        if not kept:
            kept.append(torch.ones(100 * MIB // 4))

    guard_with(200).run(batch_of(rows=16), run, "buffers of a library")


@pytest.mark.parametrize(("documents", "also"), [(1, True), (4, False)])
def test_a_budget_below_the_longest_sample_says_so(documents, also):
    guard = guard_with(200, token_budget=320)
    with pytest.raises(TrainingError) as caught:
        guard.run(batch_of(documents=documents, length=320), per_slot, "one row")
    assert ("and so the longest sample (corpus.max_length)" in str(caught.value)) == also


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_a_device_that_runs_out_is_told_in_the_same_words(error):
    def run(_):
        raise error

    with pytest.raises(TrainingError, match="16 rows needs about"):
        guard_with(400).run(batch_of(rows=16), run, "16 rows")


@pytest.mark.parametrize("whole", [200, 800])
def test_a_device_that_runs_out_in_a_part_says_what_the_whole_would_need(whole):
    """A first part that fails leaves nothing to extrapolate from but its own share."""

    def run(part):
        size = whole * len(part.rows) // 16
        torch.ones(size * MIB // 4).add_(1)
        if size > 80:
            raise torch.OutOfMemoryError("CUDA out of memory")

    limit = used_memory_bytes(CPU) + 80 * MIB
    guard = MemoryGuard(torch.device("meta"), limit_bytes=limit, token_budget=16_384)
    with pytest.raises(TrainingError, match="largest needs about") as caught:
        guard.run(batch_of(rows=16), run, "largest")
    budget = int(str(caught.value).rsplit("at most ", 1)[1].replace(",", ""))
    assert budget <= (6_600 if whole == 200 else 2_100)


def test_other_errors_stay_what_they_are():
    def run(_):
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        guard_with(400).run(batch_of(rows=16), run, "16 rows")


@pytest.mark.parametrize("micro_batch", [batch_of(rows=11), batch_of(rows=3), batch_of()])
def test_parts_grow_to_the_whole(micro_batch):
    parts = list(parts_of(micro_batch))
    shares = [share for _, share in parts]
    assert shares == sorted(set(shares)) and len(shares) == 4
    assert parts[-1] == (micro_batch, 1.0)


def test_growth_of_either_form_is_foreseen():
    shares = np.array([0.2, 0.45])
    for constant, slope, bend in [(50, 100, 0), (0, 100, 300), (0, 0, 300)]:
        known = [(s, int(constant + slope * s + bend * s**2)) for s in shares]
        whole = constant + slope + bend
        assert expected_growth(known, 1.0) == pytest.approx(whole, rel=0.05)
    assert expected_growth([], 1.0) == 0
