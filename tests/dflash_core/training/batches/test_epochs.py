"""What comes next follows from the plan alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.corpus.store import Sample, TokenStore, write_store
from dflash_core.planning import BatchingConfig, PlanCost, plan_epoch
from dflash_core.throughput import route_targets
from dflash_core.training.batches.schedule import Epochs
from tests.dflash_core.training.conftest import MakeJob


@pytest.fixture
def epochs_of(make_job: MakeJob, parts):
    def build(costs: PlanCost | None = None, **shape) -> Epochs:
        store, held_out = (TokenStore.open(parts / name) for name in ("store", "held_out"))
        update = {} if costs is None else {"consumer_cost": costs, "target_cost": costs}
        return Epochs(make_job(**shape).model_copy(update=update), store, held_out)

    return build


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=60),
    num_targets=st.integers(1, 5),
    world_size=st.integers(1, 4),
)
def test_routes_cover_what_is_placed_and_balance_its_cost(lengths, num_targets, world_size):
    config = BatchingConfig(strategy="random", token_budget=64, micro_batches_per_step=4)
    plan = plan_epoch(lengths, config, epoch=0, seed=0, world_size=world_size)
    routes = route_targets(plan.assignment, plan.costs(), num_targets)
    assert np.array_equal(routes >= 0, plan.assignment >= 0)
    assert routes.max() < num_targets
    costs = np.where(plan.assignment >= 0, plan.costs()[plan.assignment], 0)
    loads = [int(costs[routes == target].sum()) for target in range(num_targets)]
    # Longest-processing bound of giving each piece to the least loaded.
    assert max(loads) - min(loads) <= plan.costs().max()


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=60),
    num_targets=st.integers(1, 5),
    world_size=st.integers(1, 4),
)
def test_routes_in_rounds_give_each_target_one_micro_batch_in_turn(
    lengths, num_targets, world_size
):
    config = BatchingConfig(strategy="random", token_budget=64, micro_batches_per_step=4)
    plan = plan_epoch(lengths, config, epoch=0, seed=0, world_size=world_size)
    routes = route_targets(plan.assignment, plan.costs(), num_targets, True)
    assert np.array_equal(routes >= 0, plan.assignment >= 0)
    for step in routes:
        placed = step[step >= 0].tolist()
        for start in range(0, len(placed), num_targets):
            turn = placed[start : start + num_targets]
            assert len(set(turn)) == len(turn)


@pytest.mark.parametrize(("num_ranks", "num_target_ranks"), [(5, 2), (3, 0)])
def test_rounds_hold_each_ranks_stream_with_nothing_between(
    epochs_of, num_ranks, num_target_ranks
) -> None:
    epochs = epochs_of(
        topology={
            "kind": "disaggregated" if num_target_ranks else "colocated",
            "num_ranks": num_ranks,
            "num_target_ranks": max(num_target_ranks, 1),
            "shard_target": True,
        },
        micro_batches_per_step=4,
        token_budget=512,
        validation={"every_steps": 2},
    )
    count = num_target_ranks or num_ranks
    axis = "target" if num_target_ranks else "consumer"
    apart = [list(epochs.rounds(0, **{axis: rank})) for rank in range(count)]
    assert len({len(rounds) for rounds in apart}) == 1
    for rank, rounds in enumerate(apart):
        held = [work for work in rounds if work is not None]
        assert held == list(epochs.stream(0, **{axis: rank}))
    # All of an earlier round comes earlier in the run.
    ends = [0]
    for turn in zip(*apart, strict=True):
        numbers = [work.number for work in turn if work is not None]
        assert min(numbers) >= ends[-1]
        ends.append(max(numbers))


def test_measured_costs_move_work_between_ranks_and_never_between_steps(epochs_of) -> None:
    shape = {"num_ranks": 4, "num_target_ranks": 2, "micro_batches_per_step": 4}
    dear = PlanCost(per_micro_batch=7, per_slot=0, per_slot_length=5)
    plain = epochs_of(**shape)
    other = epochs_of(**shape, costs=dear)
    assert plain.ingredients() == other.ingredients()
    assert plain.plan(0).layout_hash != other.plan(0).layout_hash
    for step in range(plain.num_steps):
        held = [sorted(str(w.micro_batch.rows) for w in e.work(step)) for e in (plain, other)]
        assert held[0] == held[1]
    loads = [0, 0]
    for work in other.stream(0):
        length = work.micro_batch.padded_length
        loads[work.target] += 7 + 5 * len(work.micro_batch.rows) * length**2
    assert abs(loads[0] - loads[1]) < 0.3 * max(loads)


def test_ranks_streams_are_the_whole_runs_order_taken_apart(epochs_of) -> None:
    epochs = epochs_of(
        num_ranks=5,
        num_target_ranks=2,
        micro_batches_per_step=4,
        token_budget=512,
        validation={"every_steps": 2},
    )
    whole = list(epochs.stream(0))
    assert [work.number for work in whole] == sorted({work.number for work in whole})
    for axis, count in (("consumer", 3), ("target", 2)):
        apart = [list(epochs.stream(0, **{axis: rank})) for rank in range(count)]
        assert sorted(w.number for part in apart for w in part) == [w.number for w in whole]
        assert all([w.number for w in part] == sorted(w.number for w in part) for part in apart)
    assert list(epochs.stream(3)) == [work for work in whole if work.step >= 3]


def test_each_epoch_trains_each_sample_once_whatever_the_ranks(epochs_of) -> None:
    for shape in ({}, {"num_ranks": 3}, {"num_ranks": 3, "num_target_ranks": 1}):
        epochs = epochs_of(**shape)
        first, second = epochs.steps_per_epoch
        for steps in (range(first), range(first, first + second)):
            seen = [
                sample
                for step in steps
                for work in epochs.work(step)
                for sample in work.micro_batch.samples
            ]
            assert sorted(seen) == list(range(40))


def test_a_step_holds_the_same_samples_on_any_ranks(epochs_of) -> None:
    def steps(epochs: Epochs) -> list[set[int]]:
        return [
            {sample for work in epochs.work(step) for sample in work.micro_batch.samples}
            for step in range(epochs.num_steps)
        ]

    assert steps(epochs_of()) == steps(epochs_of(num_ranks=4, num_target_ranks=1))


def test_copies_that_fill_a_step_hold_slots_and_no_tokens(make_job: MakeJob, parts) -> None:
    job = make_job(epochs=1, token_budget=512, micro_batches_per_step=7)
    batching = job.batching.model_copy(update={"tail": "repeat"})
    store = TokenStore.open(parts / "store")
    epochs = Epochs(job.model_copy(update={"batching": batching}), store, None)
    counts = [epochs.counts(step) for step in range(epochs.num_steps)]
    plan = epochs.plan(0)
    assert plan.num_repeats > 0
    assert sum(c.real_tokens for c in counts) == store.lengths.sum()
    assert sum(c.supervised_tokens for c in counts) == store.supervised.sum()
    assert sum(c.token_slots for c in counts) > plan.slots.sum()


def test_locate_finds_every_step_of_every_epoch(epochs_of) -> None:
    epochs = epochs_of(epochs=3)
    places = [epochs.locate(step) for step in range(epochs.num_steps)]
    assert places == [(e, p) for e, n in enumerate(epochs.steps_per_epoch) for p in range(n)]


def test_held_out_samples_are_spread_over_the_lengths(make_job: MakeJob, tmp_path) -> None:
    samples = [
        Sample(np.ones(n, np.int32), np.ones(n, np.bool_), "", f"s{n}") for n in range(2, 102)
    ]
    store = write_store(tmp_path / "long", samples)
    job = make_job(token_budget=256, validation={"every_steps": 1, "num_samples": 10})
    chosen = Epochs(job, store, store).held_out_samples
    assert chosen.tolist() == list(range(0, 100, 10))


def test_held_out_micro_batches_hold_what_training_may(make_job: MakeJob, tmp_path) -> None:
    """With an anchor at every position; a sample with more than the budget is measured alone."""
    samples = [
        Sample(np.ones(n, np.int32), np.ones(n, np.bool_), "", f"s{n}") for n in range(2, 102)
    ]
    held_out = write_store(tmp_path / "held_out", samples)
    store = write_store(tmp_path / "store", samples[:30])
    limits = {"anchor_budget": 40, "max_samples": 3, "max_length": 101}
    job = make_job(validation={"every_steps": 1, "num_samples": 100})
    job = job.model_copy(update={"batching": job.batching.model_copy(update=limits)})
    batches = Epochs(job, store, held_out).held_out_batches
    held = [int((held_out.supervised[batch.samples] - 1).sum()) for batch in batches]
    assert sorted(s for batch in batches for s in batch.samples) == list(range(100))
    assert max(held) == 100
    assert max(len(batch.rows) for batch in batches) == 3
