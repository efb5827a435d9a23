"""The torchrun program: learns, resumes bit for bit, stops on request, says what went wrong."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_core.errors import ConfigError, TrainingError
from dflash_core.export.zlab import load_drafter
from dflash_core.training.checkpoint import has_checkpoint
from dflash_core.training.config import TrainingJob
from dflash_core.training.program import main, run_job
from dflash_core.training.ranks.groups import join_ranks
from dflash_core.training.ranks.stop import StopRequest
from dflash_core.training.telemetry.metrics import write_status
from dflash_core.training.telemetry.status import read_status
from tests.dflash_core.training.conftest import (
    FullDisk,
    MakeJob,
    children_of,
    free_port,
    losses,
    run_here,
    run_ranks,
    start_ranks,
    status,
    wait_for_step,
    write_job,
)


@pytest.mark.parametrize("objective", ["draft", "target"])
def test_loss_falls_and_the_model_is_written(make_job: MakeJob, objective: str) -> None:
    rate = {"learning_rate": 1e-2, "warmup_ratio": 0.0}
    job = make_job(objective=objective, epochs=10, optimizer=rate)
    run_here(job)
    trace = losses(job)
    assert sum(trace[-3:]) < sum(trace[:3]) - 0.05
    assert status(job)["state"] == "finished"
    if objective == "draft":
        assert load_drafter(job.run_dir / "drafter").spec.block_size == 4
    else:
        weights = load_file(job.run_dir / "target" / "model.safetensors")
        assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


@pytest.mark.parametrize("objective", ["draft", "target"])
def test_resumed_losses_are_bit_identical(make_job: MakeJob, objective: str) -> None:
    whole = make_job(name="whole", objective=objective)
    run_here(whole)
    cut = make_job(name="cut", objective=objective, keep_checkpoints=9)
    run_here(cut)
    # The last checkpoint is damaged: the run goes on from the one before.
    newest = sorted((cut.run_dir / "checkpoints").iterdir())
    state = newest[-1] / "state.pt"
    state.write_bytes(state.read_bytes()[:-1] + b"x")
    run_here(cut)
    assert losses(cut) == losses(whole)


def test_two_ranks_train_as_one_does(make_job: MakeJob) -> None:
    """Only the order of float32 sums differs: 1e-4 after a handful of steps."""
    alone = make_job(name="alone")
    run_here(alone)
    pair = make_job(name="pair", num_ranks=2)
    assert run_ranks(pair) == [0, 0]
    assert losses(pair) == pytest.approx(losses(alone), rel=1e-4)


def test_sigterm_saves_and_the_run_goes_on_to_the_same_losses(make_job: MakeJob) -> None:
    whole = make_job(name="whole", epochs=20)
    run_here(whole)
    job = make_job(name="stopped", num_ranks=2, epochs=20)
    process = start_ranks(job)
    wait_for_step(job, 4)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=100)
    assert status(job)["state"] == "interrupted"
    stopped_at = len(losses(job))
    assert stopped_at < len(losses(whole))
    assert run_ranks(job) == [0, 0]
    assert losses(job) == pytest.approx(losses(whole), rel=1e-3)


def test_a_killed_rank_ends_the_run_and_resume_repeats_the_trace(make_job: MakeJob) -> None:
    whole = make_job(name="whole", num_ranks=2, epochs=20)
    assert run_ranks(whole) == [0, 0]
    job = make_job(name="killed", num_ranks=2, epochs=20)
    process = start_ranks(job)
    wait_for_step(job, 5)
    os.kill(children_of(process.pid)[0], signal.SIGKILL)
    process.communicate(timeout=100)
    assert process.returncode != 0
    assert run_ranks(job) == [0, 0]
    assert losses(job) == losses(whole)


def test_a_changed_ingredient_is_refused_by_name(make_job: MakeJob) -> None:
    job = make_job()
    run_here(job)
    batching = job.batching.model_copy(update={"token_budget": 2048})
    with pytest.raises(ConfigError, match=r"token_budget was 1024 and is 2048"):
        run_here(job.model_copy(update={"batching": batching}))
    slower = make_job(optimizer={"learning_rate": 1e-5})
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate was 0.0006 and is 1e-05; put"):
        run_here(slower)


def test_a_loss_that_is_not_finite_stops_with_a_sentence(make_job: MakeJob) -> None:
    job = make_job(optimizer={"learning_rate": 1e30, "warmup_ratio": 0.0}, max_bad_steps=1)
    assert main(["--config", str(write_job(job))]) == 1
    assert "not finite in 2 steps in a row" in str(status(job)["reason"])


def test_a_run_whose_last_steps_are_not_finite_is_no_finished_one(make_job: MakeJob) -> None:
    """And the advice can be followed where it was given, from the start or a good checkpoint."""
    destroyed = {"learning_rate": 1e30, "warmup_ratio": 0.0}
    often: dict[str, Any] = {"checkpoint_every_steps": 1, "max_bad_steps": 99, "preflight": False}
    job = make_job(optimizer=destroyed, **often)
    with pytest.raises(TrainingError, match=r"7 steps in a row up to step 8, which is the last;"):
        run_here(job)
    assert not (job.run_dir / "drafter").exists()
    folder = job.run_dir / "checkpoints"
    assert not has_checkpoint(job.run_dir)
    assert [path.name for path in (folder / "set-aside").iterdir()] == ["step-00000001"]
    run_here(make_job(optimizer={"learning_rate": 1e-4}, **often))
    assert status(job)["state"] == "finished"


def test_weights_that_are_not_finite_are_never_kept(make_job: MakeJob) -> None:
    """A rate that float32 cannot hold: the first update breaks them."""
    rate = {"learning_rate": 1e39, "warmup_ratio": 0.0}
    job = make_job(optimizer=rate, checkpoint_every_steps=1, preflight=False)
    with pytest.raises(TrainingError, match="weights are not finite after step 1, where a check"):
        run_here(job)
    assert not has_checkpoint(job.run_dir)


@pytest.mark.parametrize(("objective", "max_steps"), [("draft", 1), ("target", 1), ("draft", None)])
def test_finite_weights_that_know_less_than_nothing_are_not_exported(
    make_job: MakeJob, objective: str, max_steps: int | None
) -> None:
    """After the very last update, which no step's loss shows, and after many."""
    wild = {"learning_rate": 1e3, "warmup_ratio": 0.0, "grad_clip": 1e9}
    often: dict[str, Any] = {"checkpoint_every_steps": 1, "preflight": False}
    often |= {"objective": objective, "max_steps": max_steps}
    with pytest.raises(TrainingError, match=r"2 times that of guessing \(5\.95\) and of the first"):
        run_here(job := make_job(optimizer=wild, **often))
    assert not (job.run_dir / ("drafter" if objective == "draft" else "target")).exists()
    assert not has_checkpoint(job.run_dir)
    run_here(make_job(optimizer={"learning_rate": 1e-4}, **often))
    assert status(job)["state"] == "finished"


STARTER = """
import subprocess, sys
rank = subprocess.Popen([sys.executable, "-m", "dflash_core.training", "--config", sys.argv[1]])
print(rank.pid, flush=True)
rank.wait()
"""


def test_a_rank_whose_launcher_is_killed_ends_while_it_is_still_importing(tmp_path) -> None:
    os.mkfifo(tmp_path / "job.json")  # nobody writes: reading it would take for ever
    launcher = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path / "job.json")],
        env=os.environ | {"TORCHELASTIC_RUN_ID": "x"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    with launcher.stdout:
        rank = Path(f"/proc/{int(launcher.stdout.readline())}")
        launcher.kill()
        launcher.wait()
    for _ in range(1200):
        if not rank.exists():
            return
        time.sleep(0.05)
    raise AssertionError("the rank outlives its launcher")


def test_a_full_disk_costs_checkpoints_and_not_the_run(make_job: MakeJob, capfd) -> None:
    whole = make_job(name="whole", epochs=4, checkpoint_every_steps=2)
    run_here(whole)
    job = make_job(name="full", epochs=4, checkpoint_every_steps=2)
    with join_ranks(job.training) as ranks:
        run_job(job, ranks, FullDisk(range(4, 6)))
    said = "checkpoint at step 4 was not written (File too large); the last good one stays"
    assert said in capfd.readouterr().out
    assert losses(job) == losses(whole)
    assert status(job)["state"] == "finished"


class Look(StopRequest):
    """Looks at the run's status in each step."""

    def __init__(self, job: TrainingJob) -> None:
        self._job = job
        self.seen: list[str] = []

    @property
    def asked(self) -> bool:
        self.seen.append(str(status(self._job)["state"]))
        return False


def test_a_rank_that_still_runs_does_not_cover_why_another_failed(make_job: MakeJob) -> None:
    job = make_job(epochs=1, checkpoint_every_steps=1)
    job.run_dir.mkdir()
    write_status(job.run_dir, "failed", reason="rank 1: OutOfMemoryError")
    look = Look(job)
    with join_ranks(job.training) as ranks:
        run_job(job, ranks, look)
    assert look.seen == ["failed"] * len(losses(job))
    assert main(["--config", str(write_job(job))], stop=look) == 0
    assert status(job)["state"] == "finished"


def test_a_rank_that_nobody_joins_says_so(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    joins = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in joins.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    job = make_job(num_ranks=2, timeout_s=0.5)
    assert main(["--config", str(write_job(job))]) == 1
    found = status(job)
    assert (found["state"], found["kind"]) == ("failed", "TrainingError")
    assert "rank 0 waited up to 0.5 s for the other ranks at the start" in str(found["reason"])


def test_the_first_failure_of_several_ranks_is_kept(tmp_path: Path) -> None:
    for state, reason in (("failed", "rank 1 fell"), ("failed", "rank 0 waited"), ("running", "")):
        write_status(tmp_path, state, reason=reason)
    found = read_status(tmp_path)
    assert found is not None and found.reason == "rank 1 fell"


def test_wrong_number_of_ranks_is_named(make_job: MakeJob) -> None:
    with pytest.raises(
        ConfigError, match=r"started 1 ranks but training\.topology\.num_ranks is 3"
    ):
        run_here(make_job(num_ranks=3))
