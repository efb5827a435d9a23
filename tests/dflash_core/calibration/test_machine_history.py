import json
import multiprocessing

import pytest

from dflash_core.calibration.history import hold_job, read_calibration
from dflash_core.calibration.machines import (
    PastRun,
    costs_digest,
    history_file,
    ratios_under,
    read_runs,
    remember_run,
)
from dflash_core.errors import ArtifactError
from dflash_core.target.config import TargetConfig
from dflash_core.throughput import predict
from dflash_core.training.config import TrainingConfig, TrainingJob
from tests.dflash_core.throughput.machines import machine, plan

COST = machine()


def past(run="a", measured=2.0, predicted=2.0, cost=COST) -> PastRun:
    return PastRun(
        run=run,
        calibration=costs_digest(cost),
        measured_ktok_s=measured,
        predicted_ktok_s=predicted,
    )


@pytest.fixture
def calibration(tmp_path):
    file = tmp_path / "cost.json"
    file.write_text(COST.model_dump_json())
    return file


def test_runs_are_remembered_in_order_beside_their_calibration(calibration):
    file = history_file(calibration)
    assert read_runs(file) == []
    for run in (past("a", 2.0), past("b", 1.8)):
        remember_run(file, run)
    assert file.parent == calibration.parent
    assert ratios_under(COST, read_runs(file)) == [1.0, 0.9]


def test_a_run_counts_once_and_as_it_ended(calibration):
    file = history_file(calibration)
    for run in (past("a", 2.0), past("b", 1.8), past("b", 1.8), past("a", 2.2)):
        remember_run(file, run)
    assert ratios_under(COST, read_runs(file)) == pytest.approx([0.9, 1.1])


def test_a_calibration_made_again_begins_with_no_runs(calibration):
    file = history_file(calibration)
    for number in range(10):
        remember_run(file, past(str(number), 1.6 + number / 1e4))
    assert "calibrate this machine again" in read_calibration(calibration).learnt.warning
    anew = COST.model_copy(update={"step_s": 0.5})
    calibration.write_text(anew.model_dump_json())
    learnt = read_calibration(calibration).learnt
    assert (learnt.num_runs, learnt.warning) == (0, "")
    # A run that ended before and is only called again says nothing of the new calibration.
    remember_run(file, past("9", 1.6 + 9 / 1e4, predicted=1.6, cost=anew))
    assert read_calibration(calibration).learnt.num_runs == 0


def test_what_runs_taught_counts_in_predictions_and_goes_with_a_copy(calibration, tmp_path):
    for name in "ab":
        remember_run(history_file(calibration), past(name, 1.0))
    learnt = read_calibration(calibration).cost
    assert learnt.drift > 0.4
    assert costs_digest(learnt) == costs_digest(COST)
    copy = tmp_path / "copy.json"
    copy.write_text(learnt.model_dump_json())
    assert read_calibration(copy).cost.drift == pytest.approx(learnt.drift)


def _remember(file, number):
    remember_run(file, past(str(number), 1.0 + number))


def test_runs_that_end_at_once_are_all_remembered(calibration):
    file = history_file(calibration)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_remember, args=(file, n)) for n in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert {run.run for run in read_runs(file)} == set("01234567")


@pytest.mark.parametrize("value", [0.0, -1.0, "Infinity", "NaN", None])
def test_a_damaged_history_is_named(calibration, value):
    file = history_file(calibration)
    line = past().model_dump() | {"measured_ktok_s": value}
    text = json.dumps(line).replace('"Infinity"', "Infinity").replace('"NaN"', "NaN")
    file.write_text(f"{text}\n")
    with pytest.raises(ArtifactError, match=r"is no history of a machine \(measured.*remove it"):
        read_calibration(calibration)


def test_a_line_cut_short_in_the_midst_is_named(calibration):
    file = history_file(calibration)
    file.write_text(past().model_dump_json()[:-5] + "\n")
    with pytest.raises(ArtifactError, match="is no history of a machine"):
        remember_run(file, past("b"))


def test_what_a_full_disk_left_of_a_line_blocks_no_later_run(calibration):
    file = history_file(calibration)
    remember_run(file, past("a", 2.0))
    with file.open("a") as stream:
        stream.write(past("b", 1.9).model_dump_json()[:-5])
    assert ratios_under(COST, read_runs(file)) == [1.0]
    remember_run(file, past("c", 1.8))
    assert ratios_under(COST, read_runs(file)) == [1.0, 0.9]
    assert [run.run for run in read_runs(file)] == ["a", "c"]


@pytest.mark.parametrize(("epochs", "taught"), [(1, []), (3, [1.25])])
def test_a_feature_cache_found_filled_teaches_no_drift(calibration, tmp_path, epochs, taught):
    """Its first epoch runs as fast as the readers: only these say how fast the machine is."""
    filling, reading = (
        predict(plan(), COST, block_size=8).model_copy(update={"ktok_s": ktok_s})
        for ktok_s in (4.0, 8.0)
    )
    whole = filling.model_copy(update={"first": filling, "later": reading})
    job = TrainingJob(
        run_dir=tmp_path,
        store=tmp_path,
        target=TargetConfig(path=tmp_path),
        training=TrainingConfig(features="cache"),
    )
    lines = [
        {"step": 1, "epoch": epoch, "real_tokens": 1000, "step_s": 0.1}
        for epoch in range(epochs)
        for _ in range(10)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = hold_job(job, whole, read_calibration(calibration), on_warning=pytest.fail)
    assert found.epochs[0].predicted_ktok_s == 4.0 and not found.inside
    ratios = ratios_under(COST, read_runs(history_file(calibration)))
    assert ratios == pytest.approx(taught)
