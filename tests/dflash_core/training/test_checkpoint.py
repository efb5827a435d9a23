"""Checkpoints of one attempt never cost another one its own."""

import resource
import shutil

import pytest
import torch

from dflash_core.errors import ConfigError
from dflash_core.training.checkpoint import (
    Cursor,
    checkpoint_path,
    give_up,
    latest_checkpoint,
    latest_step,
    load_checkpoint,
    read_cursor,
    save_checkpoint,
    set_aside,
)


def save(folder, step, *, keep=2, best=None):
    cursor = Cursor(step=step, best_step=best, ingredients={})
    return save_checkpoint(folder, {"step": torch.tensor(step)}, cursor, keep=keep)


def names(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


@pytest.mark.parametrize("keep", [1, 2])
def test_an_attempt_that_begins_anew_keeps_its_own_checkpoints(tmp_path, keep):
    for step in (300, 400):
        save(tmp_path, step)
    for step in (100, 200):
        save(tmp_path, step, keep=keep)
    assert names(tmp_path) == [100, 200, 300, 400][2 - keep :]


def test_later_checkpoints_are_set_aside_and_not_found_again(tmp_path):
    for step in (300, 400):
        save(tmp_path, step)
    moved = set_aside(tmp_path, after=300)
    assert [path.name for path in moved] == ["step-00000400"]
    assert int(load_checkpoint(moved[0])["step"]) == 400
    assert latest_checkpoint(tmp_path) == checkpoint_path(tmp_path, 300)
    assert set_aside(tmp_path, after=300) == []
    save(tmp_path, 400)
    again = set_aside(tmp_path, after=0)
    assert [path.name for path in again] == ["step-00000300", "step-00000400-2"]
    assert moved[0].is_dir(), "what was set aside before is still there"
    assert latest_checkpoint(tmp_path) is None


def test_a_damaged_checkpoint_does_not_cost_the_next_one(tmp_path):
    save(tmp_path, 200)
    (save(tmp_path, 300) / "state.pt").write_bytes(b"cut short")
    found = latest_checkpoint(tmp_path)
    assert found == checkpoint_path(tmp_path, 200)
    set_aside(tmp_path, after=200)
    save(tmp_path, 250, keep=1)
    assert names(tmp_path) == [250]


def test_the_best_stays_beside_the_newest(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, best=1)
    assert names(tmp_path) == [1, 3, 4]


@pytest.mark.parametrize("num_floats", [1 << 11, 1 << 16, 1 << 20])
def test_a_full_disk_is_an_oserror_whatever_the_writer_makes_of_it(tmp_path, num_floats):
    save(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    state = {str(n): torch.ones(num_floats) for n in range((1 << 21) // num_floats)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_checkpoint(tmp_path, state, Cursor(step=2, ingredients={}), keep=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == [1]


def test_a_copy_with_a_name_of_its_own_is_nobodys_checkpoint(tmp_path):
    save(tmp_path, 1)
    copy = shutil.copytree(checkpoint_path(tmp_path, 1), tmp_path / "step-00000009-keep")
    for step in (2, 3):
        save(tmp_path, step)
    assert copy.is_dir()
    assert latest_step(tmp_path) == 3
    assert latest_checkpoint(tmp_path) == checkpoint_path(tmp_path, 3)
    assert [path.name for path in set_aside(tmp_path, after=2)] == ["step-00000003"]


def test_a_run_that_diverged_goes_on_at_another_rate_from_what_was_good(tmp_path):
    """Until a checkpoint says at which; nothing else may change."""
    for step in (200, 300):
        save(tmp_path, step)
    rate = {"training.optimizer.learning_rate": "1e-05"}
    with pytest.raises(ConfigError, match="learning_rate was absent and is 1e-05"):
        read_cursor(checkpoint_path(tmp_path, 300), rate)
    give_up(tmp_path, step=300)
    good = checkpoint_path(tmp_path, 200)
    assert latest_checkpoint(tmp_path) == good
    assert read_cursor(good, rate) == Cursor(step=200, ingredients=rate)
    with pytest.raises(ConfigError, match="seed was absent"):
        read_cursor(good, rate | {"seed": "7"})
    save(tmp_path, 400)
    with pytest.raises(ConfigError, match="learning_rate"):
        read_cursor(good, rate)
