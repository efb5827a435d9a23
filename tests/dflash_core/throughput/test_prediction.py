import numpy as np
import pytest

from dflash_core.errors import CalibrationError
from dflash_core.planning import BatchingConfig, num_anchors, plan_epoch
from dflash_core.throughput import (
    Coefficients,
    CostModel,
    RoleFit,
    Split,
    Workload,
    predict,
)
from dflash_core.throughput.topology import Topology
from dflash_core.training.config import TopologyConfig
from tests.dflash_core.throughput.machines import DRAFT, MARKS, PREFETCH, TARGET, machine, plan

BLOCK = 8


def test_workload_counts_what_each_micro_batch_holds():
    found = plan(strategy="random")
    lengths, supervised = found.identity.lengths, found.identity.supervised
    work = Workload.of_plan(found, block_size=BLOCK)
    for index in range(found.num_micro_batches):
        members = found.micro_batch(index)
        anchors = num_anchors(supervised[members], found.identity.config.anchors)
        assert work.documents[index] == len(members)
        assert work.slots[index] == len(members) * lengths[members].max()
        assert work.slot_lengths[index] == len(members) * lengths[members].max() ** 2
        assert work.anchor_contexts[index] == (anchors * lengths[members]).sum() * BLOCK


def test_workload_counts_samples_by_what_was_kept_of_them():
    lengths = np.array([50, 0, 70, 5000, 90, 40])
    config = BatchingConfig(
        strategy="sorted", token_budget=100, oversize="drop", micro_batches_per_step=1
    )
    found = plan_epoch(lengths, config, epoch=0, seed=0, world_size=1, supervised=lengths // 2)
    work = Workload.of_plan(found, block_size=1)
    per_sample = num_anchors(lengths // 2, config.anchors) * lengths
    assert work.anchor_contexts.sum() == per_sample[[0, 2, 4, 5]].sum()


def test_attention_of_packed_rows_costs_what_its_kernel_computes():
    packed = plan(strategy="packed")
    dense = Workload.of_plan(packed, block_size=BLOCK)
    sparse = Workload.of_plan(packed, block_size=BLOCK, attends_documents_only=True)
    assert sparse.slot_lengths.sum() < dense.slot_lengths.sum() / 2


def test_an_epoch_on_one_rank_takes_the_sum_of_its_micro_batches():
    found = plan(world_size=1)
    cost = machine()
    amounts = Workload.of_plan(found, block_size=BLOCK).amounts
    work = (TARGET.seconds(amounts) + DRAFT.seconds(amounts)).sum()
    prediction = predict(found, cost, block_size=BLOCK)
    expected = work + cost.step_s * found.num_steps
    assert prediction.epoch_s == pytest.approx(expected, rel=1e-3)  # the first read is not hidden
    assert prediction.ktok_s == pytest.approx(found.total_tokens / prediction.epoch_s / 1000)
    assert prediction.step_s * found.num_steps == pytest.approx(prediction.epoch_s)


def test_whole_runs_and_device_hours_count_all_ranks_and_epochs():
    prediction = predict(
        plan(),
        machine(),
        block_size=BLOCK,
        topology=Split(num_ranks=3, num_target_ranks=1),
        epochs=6,
    )
    assert prediction.run_s == pytest.approx(6 * prediction.epoch_s)
    assert prediction.device_hours == pytest.approx(3 * prediction.run_s / 3600)


def test_without_cores_to_spare_reading_adds_to_computing():
    found = plan(world_size=1)
    hidden = predict(found, machine(), block_size=BLOCK)
    shown = predict(found, machine(overlaps=False), block_size=BLOCK)
    amounts = Workload.of_plan(found, block_size=BLOCK).amounts
    reading = machine().prefetch.coefficients.seconds(amounts).sum()
    assert shown.epoch_s - hidden.epoch_s == pytest.approx(reading, rel=0.02)


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize(
    "split", [Split(num_ranks=2), Split(num_ranks=3, num_target_ranks=1), Split(num_ranks=5)]
)
def test_busy_shares_are_each_stages_own_work_as_training_measures_it(split, overlaps):
    found = plan(world_size=split.num_consumers)
    cost = machine(overlaps=overlaps, reduce_s=0.5, correction=1.2)
    prediction = predict(found, cost, block_size=BLOCK, topology=split)
    totals = Workload.of_plan(found, block_size=BLOCK).totals
    targets = split.num_target_ranks or split.num_consumers
    seconds = {
        "prefetch": float(PREFETCH.seconds(totals)) / split.num_consumers,
        "target": float(TARGET.seconds(totals)) / targets,
        "draft": float(DRAFT.seconds(totals)) / split.num_consumers + found.num_steps * cost.step_s,
    }
    for stage, work_s in seconds.items():
        share = getattr(prediction, f"{stage}_busy")
        assert share * prediction.epoch_s == pytest.approx(1.2 * work_s), stage


def test_more_target_ranks_move_the_bottleneck_to_the_drafter():
    cost = machine(target=RoleFit(coefficients=Coefficients(slot_s=2e-5)))
    found = plan(world_size=1)
    slow = predict(found, cost, block_size=BLOCK, topology=Split(num_ranks=2, num_target_ranks=1))
    fast = predict(found, cost, block_size=BLOCK, topology=Split(num_ranks=8, num_target_ranks=7))
    assert (slow.bottleneck, fast.bottleneck) == ("target", "draft")
    assert slow.starving_share > 0.2 > fast.starving_share
    assert fast.ktok_s > slow.ktok_s


def test_stragglers_bind_where_ranks_are_dealt_at_random_and_noise_is_large():
    found = plan(strategy="sorted", mixing="random", world_size=6)
    prediction = predict(found, machine(jitter=1.5), block_size=BLOCK)
    assert prediction.bottleneck == "straggler"
    assert prediction.waiting_share > prediction.draft_busy


@pytest.mark.parametrize("split", [Split(num_ranks=2), Split(num_ranks=3, num_target_ranks=1)])
@pytest.mark.parametrize(
    ("role", "truth"), [("prefetch", PREFETCH), ("target", TARGET), ("draft", DRAFT)]
)
@pytest.mark.parametrize("scale", [0.3, 0.9, 1.5, 3.0])
def test_the_interval_holds_every_fit_that_leaves_a_shape_out(split, role, truth, scale):
    def predicted(**changes):
        cost = machine(drift=0.0, overlaps=False, **changes)
        return predict(plan(), cost, block_size=BLOCK, topology=split)

    terms = {name: scale * value for name, value in truth.model_dump().items()}
    other = Coefficients.model_validate(terms)
    sure = predicted()
    unsure = predicted(**{role: RoleFit(coefficients=truth, alternatives=(truth, other))})
    truly = predicted(**{role: RoleFit(coefficients=other)})
    assert sure.low == sure.ktok_s == sure.high == unsure.ktok_s
    ends = sorted([sure.ktok_s, truly.ktok_s])
    # Routes follow from the costs that training is given, which stay those of the whole fit.
    assert (unsure.low, unsure.high) == pytest.approx(ends, rel=1e-3)


def test_a_run_that_ends_early_takes_the_time_of_its_steps():
    found = plan()
    whole = predict(found, machine(), block_size=BLOCK, epochs=6)
    short = predict(found, machine(), block_size=BLOCK, epochs=6, max_steps=2 * found.num_steps)
    assert short.run_s == pytest.approx(whole.run_s / 3)
    assert (short.ktok_s, short.epoch_s) == (whole.ktok_s, whole.epoch_s)
    longer = predict(found, machine(), block_size=BLOCK, epochs=6, max_steps=10**9)
    assert longer == whole


def test_gradients_are_summed_over_the_ranks_that_train_the_drafter():
    cost = machine(fingerprint=MARKS, step_s=1.0, reduce_s=0.5)  # measured on two ranks
    assert cost.step_seconds(1) == 1.0
    assert cost.step_seconds(2) == 1.5
    assert cost.step_seconds(4) == 1.75


def test_an_unsure_rehearsal_widens_the_interval():
    prediction = predict(plan(), machine(drift=0.0, correction_error=0.1), block_size=BLOCK)
    assert prediction.high == pytest.approx(1.1 * prediction.ktok_s)


def test_drift_widens_the_interval():
    prediction = predict(plan(), machine(drift=0.25), block_size=BLOCK)
    assert prediction.high == pytest.approx(1.25 * prediction.ktok_s)
    assert prediction.low == pytest.approx(prediction.ktok_s / 1.25)


READ = RoleFit(coefficients=Coefficients(token_s=1e-7))


def test_kept_features_save_the_target_after_the_first_epoch():
    cost = machine(read=READ)
    first = predict(plan(), cost, block_size=BLOCK)
    without_target = machine(target=READ)
    later = predict(plan(), without_target, block_size=BLOCK)
    whole = predict(plan(), cost, block_size=BLOCK, epochs=4, features="cache")
    assert whole.of_epoch(0) == first
    assert whole.of_epoch(1) == whole.of_epoch(3) == later
    assert whole.run_s == pytest.approx(first.run_s + 3 * later.run_s)
    assert whole.device_hours == pytest.approx(2 * whole.run_s / 3600)
    tokens = plan().total_tokens
    assert whole.ktok_s == pytest.approx(4 * tokens / whole.run_s / 1000)
    assert first.ktok_s < whole.ktok_s < later.ktok_s
    assert whole.low < whole.ktok_s < whole.high
    assert whole.target_busy < first.target_busy
    assert whole.run_ktok_s(first.ktok_s / 2) == pytest.approx(whole.ktok_s / 2)
    assert first.run_ktok_s(3.0) == pytest.approx(3.0)


def test_one_epoch_never_reads_what_it_keeps():
    cost = machine(read=READ)
    whole = predict(plan(), cost, block_size=BLOCK, features="cache")
    assert whole == predict(plan(), cost, block_size=BLOCK)


@pytest.mark.parametrize("share", [0.5, 1.0, 1.5, 3.0])
def test_a_run_with_kept_features_that_ends_early_reads_less(share):
    cost, found = machine(read=READ), plan()
    steps = round(share * found.num_steps)

    def predicted(**limits):
        return predict(found, cost, block_size=BLOCK, features="cache", **limits)

    cut = predicted(epochs=6, max_steps=steps)
    first, later = predicted(epochs=1), predicted(epochs=2).of_epoch(1)
    length = steps / found.num_steps
    seconds = min(length, 1) * first.epoch_s + max(length - 1, 0) * later.epoch_s
    assert cut.run_s == pytest.approx(seconds)
    assert cut.ktok_s == pytest.approx(length * found.total_tokens / seconds / 1000)


def test_reading_features_must_have_been_measured():
    with pytest.raises(CalibrationError, match=r"reading kept features .* 'cache'"):
        predict(plan(), machine(), block_size=BLOCK, epochs=2, features="cache")


def test_a_run_s_own_topology_can_be_asked_about():
    topology: Topology = TopologyConfig(kind="disaggregated", num_ranks=3, num_target_ranks=1)
    assert predict(plan(), machine(), block_size=BLOCK, topology=topology).ktok_s > 0


def test_a_plan_for_other_ranks_is_refused():
    with pytest.raises(CalibrationError, match=r"laid out for 2 consuming ranks and .* has 4"):
        predict(plan(), machine(), block_size=BLOCK, topology=Split(num_ranks=4))


def test_lengths_without_supervised_tokens_are_refused():
    with pytest.raises(CalibrationError, match="supervised tokens"):
        predict(plan(supervised=False), machine(), block_size=BLOCK)


def test_a_split_leaves_a_drafter():
    with pytest.raises(ValueError, match="4 target ranks leave no drafter among 4"):
        Split(num_ranks=4, num_target_ranks=4)
    assert Split(num_ranks=8, num_target_ranks=6).label == "6+2"
    assert Split(num_ranks=8).label == "8 colocated"


def test_plan_costs_keep_the_proportions_of_the_measured_terms():
    cost = machine().plan_cost("colocated", block_size=BLOCK, lengths=[100, 300])
    rows, lengths = np.array([1, 8, 2]), np.array([1000, 100, 300])
    anchors = np.array([60, 50, 40])
    measured = (
        TARGET.constant_s
        + DRAFT.constant_s
        + rows * lengths * (TARGET.slot_s + DRAFT.token_s + TARGET.slot_length_s * lengths)
        + anchors * BLOCK * (DRAFT.anchor_token_s + DRAFT.anchor_context_s * 200)
    )
    ratio = cost.of(rows, lengths, anchors) / measured
    np.testing.assert_allclose(ratio / ratio[0], 1.0, rtol=0.005)  # coefficients are whole numbers
    alone = machine().plan_cost("disaggregated", block_size=BLOCK, lengths=[100, 300])
    assert alone.per_slot_length == 0
    empty = CostModel(target=RoleFit(), draft=RoleFit())
    with pytest.raises(CalibrationError, match="take no time at all"):
        predict(plan(), empty, block_size=BLOCK)
    assert empty.plan_cost("colocated", block_size=8, lengths=[9]).per_slot == 3000


@pytest.mark.parametrize("slot_s", [1e-9, 1e-15, 0.0])
def test_micro_batches_whose_launches_take_most_are_balanced_too(slot_s):
    launches = RoleFit(coefficients=Coefficients(constant_s=0.02, slot_s=slot_s))
    cost = machine(target=launches, draft=launches)
    for balance in (
        cost.target_cost(),
        cost.plan_cost("colocated", block_size=BLOCK, lengths=[100]),
    ):
        assert balance.per_micro_batch > 10**5 * balance.per_slot
        assert balance.per_slot_length == 0


def test_numbers_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="finite"):
        Coefficients(slot_s=float("inf"))
    with pytest.raises(ValueError, match="finite"):
        machine(drift=float("nan"))


def test_a_calibration_of_another_machine_or_model_is_refused():
    cost = machine(fingerprint=MARKS)
    cost.require(MARKS)
    with pytest.raises(CalibrationError, match="'two cores' is not 'a GPU'; num_ranks '2'"):
        cost.require(MARKS.model_copy(update={"hardware": "a GPU", "num_ranks": 8}))
    with pytest.raises(CalibrationError, match="does not say what it was measured on"):
        machine().require(MARKS)


def test_a_cost_model_survives_being_written_down():
    cost = machine(fingerprint=MARKS, jitter=0.1)
    assert CostModel.model_validate_json(cost.model_dump_json()) == cost
    assert cost.relative_error == 0
    assert cost.inseparable == ()
    assert not cost.attends_documents_only
    assert len(MARKS.digest) == 16
