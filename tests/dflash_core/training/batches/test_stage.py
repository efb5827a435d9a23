"""A stage runs ahead by so much, keeps order, and lets errors out."""

import threading
import time

import pytest
import torch

from dflash_core.errors import TrainingError
from dflash_core.training.batches.prefetch import Stage
from dflash_core.training.ranks.lane import Lane


def stage(items, *, depth=2, timeout_s=60.0):
    return Stage(
        iter(items),
        depth=depth,
        name="prefetch",
        lane=Lane(torch.device("cpu")),
        timeout_s=timeout_s,
    )


def test_everything_comes_out_in_order():
    assert list(stage(range(100), depth=3)) == list(range(100))


def test_it_runs_ahead_by_its_depth_and_no_further():
    started = []

    def items():
        for index in range(20):
            started.append(index)
            yield index

    ahead = stage(items(), depth=3)
    assert next(ahead) == 0
    for _ in range(6000):
        if len(started) == 5:
            break
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(started) == 5  # one taken, three waiting, one in hand
    ahead.close()


def test_an_error_comes_out_after_what_was_made_before_it():
    def items():
        yield 1
        raise ValueError("shard 7 is damaged")

    ahead = stage(items())
    assert next(ahead) == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="shard 7"):
            next(ahead)


def test_a_slow_reader_is_named():
    freed = threading.Event()

    def items():
        freed.wait()
        yield 1

    ahead = stage(items(), timeout_s=0.05)
    with pytest.raises(TrainingError, match=r"the prefetch stage gave nothing for 0\.05 s"):
        next(ahead)
    freed.set()
    ahead.close()


def test_closing_ends_the_thread_while_results_wait():
    ahead = stage(iter(int, 1), depth=1)
    next(ahead)
    ahead.close()
    assert ahead.num_waiting == 0


def test_stuck_storage_does_not_hold_up_a_run_that_failed():
    freed = threading.Event()

    def items():
        freed.wait()
        yield 1

    ahead = stage(items(), timeout_s=0.05)
    ahead.close(wait_s=0.0)
    ahead.close()
    assert not freed.is_set()
    freed.set()
