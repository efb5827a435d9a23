import pytest

from dflash_core.errors import ArtifactError
from dflash_core.training.machine_history import history_file, read_ratios, remember_ratio
from tests.dflash_core.throughput.machines import MARKS


def test_runs_are_remembered_in_order_by_machine_and_model(tmp_path):
    file = history_file(tmp_path, MARKS)
    other = history_file(tmp_path, MARKS.model_copy(update={"hardware": "a GPU"}))
    assert read_ratios(file) == []
    for ratio in (1.0, 0.9):
        remember_ratio(file, ratio)
    assert read_ratios(file) == [1.0, 0.9]
    assert read_ratios(other) == []


def test_only_the_newest_runs_are_kept(tmp_path):
    file = history_file(tmp_path, MARKS)
    for ratio in range(1, 105):
        remember_ratio(file, float(ratio))
    assert read_ratios(file)[0] == 5.0


def test_a_damaged_history_is_named(tmp_path):
    file = tmp_path / "machine.json"
    file.write_text("[]")
    with pytest.raises(ArtifactError, match="is no history of a machine; remove it"):
        read_ratios(file)
