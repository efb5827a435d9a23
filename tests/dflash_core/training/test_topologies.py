"""Who does what must not change what is learnt."""

import os
import shutil
import signal

import pytest

from dflash_core.errors import ConfigError
from dflash_core.training.config import TopologyConfig
from tests.dflash_core.training.conftest import (
    MakeJob,
    children_of,
    finish,
    fork_ranks,
    losses,
    read_steps,
    run_here,
    run_ranks,
    start_ranks,
    status,
    wait_for_step,
)

# One drafter rank sums micro-batches in the plan's order wherever the target runs: the same bits.
# Several drafter ranks sum float32 gradients in another order: 1e-5 after a handful of steps.
SHARES = [(2, 0, 1e-5), (2, 1, 0.0), (3, 2, 0.0), (3, 1, 1e-5)]


@pytest.mark.parametrize("strategy", ["random", "packed"])
def test_losses_are_the_same_on_every_topology(make_job: MakeJob, strategy: str) -> None:
    shape = {"strategy": strategy, "token_budget": 512, "micro_batches_per_step": 4}
    alone = make_job(name="alone", **shape)
    run_here(alone)
    for num_ranks, num_target_ranks, tolerance in SHARES:
        job = make_job(
            name=f"{num_ranks}-{num_target_ranks}",
            num_ranks=num_ranks,
            num_target_ranks=num_target_ranks,
            **shape,
        )
        assert run_ranks(job) == [0] * num_ranks
        assert losses(job) == pytest.approx(losses(alone), rel=tolerance, abs=0.0)


def test_a_drafter_rank_can_begin_with_the_targets_layers(make_job: MakeJob) -> None:
    found = []
    for name, ranks in (("alone", {}), ("apart", {"num_ranks": 2, "num_target_ranks": 1})):
        job = make_job(name=name, epochs=1, **ranks)
        draft = job.draft.model_copy(update={"initial_weights": "target"})
        job = job.model_copy(update={"draft": draft})
        assert run_ranks(job) == [0] * job.training.topology.num_ranks
        found.append(losses(job))
    assert found[0] == found[1]


def test_a_run_goes_on_under_another_topology(make_job: MakeJob) -> None:
    whole = make_job(name="whole", keep_checkpoints=9)
    run_here(whole)
    moved = make_job(name="moved", num_ranks=3, num_target_ranks=1)
    shutil.copytree(whole.run_dir, moved.run_dir)
    for late in sorted((moved.run_dir / "checkpoints").iterdir())[1:]:
        shutil.rmtree(late)
    assert run_ranks(moved) == [0, 0, 0]
    assert losses(moved) == pytest.approx(losses(whole), rel=1e-5)


def test_sigterm_under_torchrun_stops_all_and_the_run_resumes_bit_for_bit(
    make_job: MakeJob,
) -> None:
    whole = make_job(name="whole", num_ranks=2, num_target_ranks=1, epochs=20)
    assert run_ranks(whole) == [0, 0]
    job = make_job(name="stopped", num_ranks=2, num_target_ranks=1, epochs=20)
    process = start_ranks(job)
    wait_for_step(job, 4)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=100)
    assert status(job)["state"] == "interrupted"
    assert len(losses(job)) < len(losses(whole))
    assert run_ranks(job) == [0, 0]
    assert losses(job) == losses(whole)


@pytest.mark.integration
def test_torchrun_restarts_a_run_whose_target_rank_was_killed(make_job: MakeJob) -> None:
    whole = make_job(name="whole", num_ranks=2, num_target_ranks=1, epochs=20)
    assert run_ranks(whole) == [0, 0]
    job = make_job(name="killed", num_ranks=2, num_target_ranks=1, epochs=20)
    process = start_ranks(job, "--max-restarts=1", "--monitor-interval=0.5")
    wait_for_step(job, 4)
    os.kill(children_of(process.pid)[-1], signal.SIGKILL)
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 0, output
    assert losses(job) == losses(whole)


def test_a_killed_target_rank_is_named_by_who_waited_for_it(make_job: MakeJob) -> None:
    job = make_job(num_ranks=2, num_target_ranks=1, epochs=200)
    ranks = fork_ranks(job)
    wait_for_step(job, 2)
    ranks[1].kill()
    assert finish(ranks)[0] == 1
    assert status(job)["state"] == "failed"
    assert "rank 0 (drafter) waited" in str(status(job)["reason"])
    assert "rank 1 (target)" in str(status(job)["reason"])


def test_every_stage_is_timed_and_the_bottleneck_is_one_of_them(make_job: MakeJob) -> None:
    job = make_job(num_ranks=2, num_target_ranks=1)
    assert run_ranks(job) == [0, 0]
    for step in read_steps(job):
        assert step["bottleneck"] in {"prefetch", "target", "draft", "wait"}
        assert set(step["busy_shares"]) == {"prefetch", "target", "draft"}
        assert step["target_s"] > 0 < step["draft_s"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"objective": "target"}, "has no frozen target"),
        ({"features": "cache"}, "the rank that trains"),
        ({"validation": {"every_steps": 2, "accept_every_steps": 2}}, "on one rank"),
    ],
)
def test_what_separate_ranks_cannot_do_is_refused(
    make_job: MakeJob, changes: dict, sentence: str
) -> None:
    from dflash_core.training.config import check_job

    with pytest.raises(ConfigError, match=sentence):
        check_job(make_job(num_ranks=2, num_target_ranks=1, **changes))


def test_a_target_that_changes_has_no_features_to_keep(make_job: MakeJob) -> None:
    from dflash_core.training.config import check_job

    with pytest.raises(ConfigError, match=r"set training\.features to 'online'"):
        check_job(make_job(objective="target", features="cache"))


@pytest.mark.integration
@pytest.mark.parametrize("num_target_ranks", [6, 4])
def test_eight_ranks_run_to_the_end(make_job: MakeJob, num_target_ranks: int) -> None:
    job = make_job(num_ranks=8, num_target_ranks=num_target_ranks, micro_batches_per_step=8)
    assert run_ranks(job) == [0] * 8
    assert status(job)["state"] == "finished"


# The layers are gathered whole before they run, so a sharded target gives the same bits.
SHARDED = [(2, 0, 1e-5), (3, 2, 0.0), (4, 3, 0.0)]


@pytest.mark.parametrize(("num_ranks", "num_target_ranks", "tolerance"), SHARDED)
def test_a_sharded_target_trains_the_same_drafter(
    make_job: MakeJob, num_ranks: int, num_target_ranks: int, tolerance: float
) -> None:
    # Steps of 4 micro-batches leave some ranks without one in a round.
    shape = {
        "token_budget": 512,
        "micro_batches_per_step": 4,
        "validation": {"every_steps": 3, "num_samples": 9},
    }
    alone = make_job(name="alone", **shape)
    run_here(alone)
    topology = TopologyConfig(
        kind="disaggregated" if num_target_ranks else "colocated",
        num_ranks=num_ranks,
        num_target_ranks=max(num_target_ranks, 1),
        shard_target=True,
    )
    job = make_job(name="sharded", **shape, topology=topology)
    assert run_ranks(job) == [0] * num_ranks
    assert losses(job) == pytest.approx(losses(alone), rel=tolerance, abs=0.0)


def test_ranks_that_share_a_target_stop_together(make_job: MakeJob) -> None:
    """One of them has nothing more to send while another still must: none waits for long."""
    topology = TopologyConfig(
        kind="disaggregated", num_ranks=4, num_target_ranks=2, shard_target=True
    )
    job = make_job(epochs=200, topology=topology, micro_batches_per_step=3, timeout_s=60.0)
    ranks = fork_ranks(job)
    wait_for_step(job, 5)
    os.kill(ranks[0].pid or 0, signal.SIGTERM)
    assert finish(ranks) == [0] * 4
    assert status(job)["state"] == "interrupted"
