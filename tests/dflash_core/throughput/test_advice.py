import numpy as np
import pytest

from dflash_core.errors import ConfigError, PlanError
from dflash_core.planning import BatchingConfig
from dflash_core.throughput import Coefficients, RoleFit, advise, splits_of
from tests.dflash_core.throughput.machines import MARKS, machine

LENGTHS = np.minimum(np.random.default_rng(0).lognormal(4.5, 0.8, 600).astype(np.int64) + 8, 1000)
CONFIG = BatchingConfig(
    strategy="pooled", token_budget=4096, pool_size=128, micro_batches_per_step=4
)


def options(cost, *, num_ranks=8, config=CONFIG, lengths=LENGTHS):
    return advise(lengths, config, cost, num_ranks=num_ranks, supervised=lengths // 2, block_size=8)


def heavy(role):
    return machine(**{role: RoleFit(coefficients=Coefficients(token_s=3e-5, slot_s=3e-5))})


def test_options_are_ranked_and_say_why():
    found = options(machine())
    speeds = [option.prediction.ktok_s for option in found]
    assert speeds == sorted(speeds, reverse=True)
    assert found[0].share_of_best == 1
    assert {option.split.label for option in found} == {s.label for s in splits_of(8)}
    assert all("whose fixed part is" in option.reason for option in found)


def test_a_heavy_target_gets_more_ranks_than_a_heavy_drafter():
    def best_split(cost):
        return next(o.split for o in options(cost) if o.split.kind == "disaggregated")

    assert best_split(heavy("target")).num_target_ranks > 4
    assert best_split(heavy("draft")).num_target_ranks < 4


def test_a_budget_that_binds_nowhere_is_no_option_of_its_own():
    found = options(machine(), config=CONFIG.model_copy(update={"anchor_budget": 10**6}))
    seen = [(o.split.label, o.token_budget, o.prediction.epoch_s) for o in found]
    assert len(set(seen)) == len(seen)


def test_runs_that_keep_features_are_colocated_and_read_after_the_first_epoch():
    marks = MARKS.model_copy(update={"features": "cache"})
    read = RoleFit(coefficients=Coefficients(token_s=1e-7))
    cost = machine(fingerprint=marks, read=read)
    once, often = (
        advise(
            LENGTHS,
            CONFIG,
            cost,
            num_ranks=4,
            supervised=LENGTHS // 2,
            block_size=8,
            epochs=epochs,
        )[0]
        for epochs in (1, 6)
    )
    assert once.split.label == often.split.label == "4 colocated"
    assert often.prediction.ktok_s > 1.1 * once.prediction.ktok_s


def test_a_target_that_was_sharded_stays_so():
    cost = machine(fingerprint=MARKS.model_copy(update={"shard_target": True}))
    assert all(option.split.shard_target for option in options(cost))


def test_smaller_budgets_keep_the_size_of_a_step():
    found = {(o.token_budget, o.micro_batches_per_step) for o in options(machine())}
    assert found == {(4096, 4), (2048, 8), (1024, 16)}


def test_the_reason_names_what_idles():
    for option in options(heavy("target")):
        if option.split.label == "4+4":
            assert option.prediction.bottleneck == "target"
            assert option.reason.startswith("target binds, drafter ranks idle ")


def test_one_rank_can_only_be_colocated():
    assert {option.split.label for option in options(machine(), num_ranks=1)} == {"1 colocated"}


def test_budgets_that_give_no_plan_are_an_error():
    impossible = CONFIG.model_copy(update={"anchor_budget": 1})
    with pytest.raises(PlanError, match="anchor"):
        options(machine(), config=impossible, lengths=np.full(9, 400))
    with pytest.raises(ConfigError, match="0 ranks"):
        options(machine(), num_ranks=0)
    with pytest.raises(ConfigError, match=r"there are 100,000 ranks to divide; give 1 to 1,024"):
        options(machine(), num_ranks=100_000)


@pytest.mark.parametrize("oversize", ["error", "drop", "truncate"])
def test_a_smaller_budget_drops_and_cuts_nothing_more(oversize):
    """Half the budget would hold 510 tokens, but not as a multiple of 100."""
    changes = {"token_budget": 1024, "multiple_of": 100, "oversize": oversize}
    config = CONFIG.model_copy(update=changes)
    found = options(machine(), config=config, lengths=np.array([510, 300] * 25))
    assert {option.token_budget for option in found} == {1024}


def test_a_smaller_budget_that_given_edges_exceed_is_no_option():
    changes = {"strategy": "bucketed", "edges": (3000,), "pad_to": "edge"}
    found = options(machine(), config=CONFIG.model_copy(update=changes))
    assert {option.token_budget for option in found} == {4096}


def test_samples_without_a_length_are_left_out():
    lengths = np.array([None, *LENGTHS.tolist()], dtype=object)
    config = CONFIG.model_copy(update={"oversize": "drop"})
    found = advise(
        lengths,
        config,
        machine(),
        num_ranks=2,
        supervised=np.array([9, *(LENGTHS // 2)]),
        block_size=8,
    )
    assert all(option.prediction.ktok_s > 0 for option in found)


def test_many_ranks_are_divided_evenly():
    counts = [split.num_target_ranks for split in splits_of(1024)]
    assert len(counts) == 32
    assert counts[:2] == [0, 1023] and counts[16] == 512 and counts[-1] == 1
    assert [split.num_target_ranks for split in splits_of(32)] == [0, *range(31, 0, -1)]
