"""Bad input that only a flow can find: the run fails with one sentence."""

from pathlib import Path

import pytest

from configs.settings import RunConfig
from dflash_core.errors import DFlashError, InputError
from flows.cli import EXIT_INPUT
from flows.train_drafter import train_drafter
from tasks.places.run_folder import open_run_folder
from tests.dflash_core.throughput.machines import MARKS, machine
from tests.flows.conftest import MakeSettings

pytestmark = pytest.mark.usefixtures("prefect_server")


def fail(settings: object) -> str:
    state = train_drafter(settings, return_state=True)
    error = state.result(raise_on_failure=False)
    assert isinstance(error, InputError), state.message
    assert error.exit_code == EXIT_INPUT
    assert "\n" not in str(error)
    return str(error)


def test_target_folder_that_is_no_model(tiny_settings: MakeSettings, tmp_path: Path) -> None:
    settings = tiny_settings(target={"path": tmp_path})
    assert "no config.json; set target.path" in fail(settings)
    assert not (settings.run.root / "cache" / "corpus").exists()


def test_missing_layer(tiny_settings: MakeSettings) -> None:
    assert "names layer 9" in fail(tiny_settings(target={"layer_ids": (0, 9)}))


def test_settings_that_contradict_each_other_are_said_before_the_corpus_is_made(
    tiny_settings: MakeSettings, tmp_path: Path
) -> None:
    topology = {"num_ranks": 2, "kind": "disaggregated"}
    settings = tiny_settings(
        run={"root": tmp_path / "runs"}, training={"topology": topology, "features": "cache"}
    )
    assert "set training.topology.kind to 'colocated'" in fail(settings)
    assert not list((settings.run.root / "cache").iterdir())


def test_missing_and_empty_corpus(tiny_settings: MakeSettings, tmp_path: Path) -> None:
    missing = tiny_settings(corpus={"inputs": [tmp_path / "nowhere.jsonl"]})
    assert "nowhere.jsonl" in fail(missing)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert "is empty" in fail(tiny_settings(corpus={"inputs": [empty]}))


def test_a_disk_that_is_nearly_full_is_said_at_the_start(tiny_settings: MakeSettings) -> None:
    said = fail(tiny_settings(run={"name": "full", "min_free_gb": 1e9}))
    assert "GB left but a run wants 1e+09 GB (run.min_free_gb)" in said


def test_a_disk_that_becomes_full_is_one_sentence(tmp_path: Path) -> None:
    with (
        pytest.raises(
            DFlashError, match=r"the disk of .*/run is full \(No space left on device\);"
        ),
        open_run_folder(RunConfig(root=tmp_path), default_name="run"),
    ):
        Path("/dev/full").write_text("x")


def test_unknown_strategy(tiny_settings: MakeSettings) -> None:
    assert "nonesuch" in fail(tiny_settings(compare={"strategies": ["nonesuch"]}))


def test_a_calibration_of_another_machine(tiny_settings: MakeSettings, tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    file.write_text(machine(fingerprint=MARKS).model_dump_json())
    assert "hardware 'two cores' is not" in fail(tiny_settings(run={"calibration": file}))


def test_what_only_the_ranks_of_a_calibration_find(
    tiny_settings: MakeSettings, tmp_path: Path
) -> None:
    """Their own error comes out of torchrun; no calibration of another test has this drafter."""
    nowhere = {"warm_start": tmp_path / "nowhere"}
    said = fail(tiny_settings(run=nowhere, draft={"block_size": 3}))
    assert "nowhere" in said and "failed" not in said


def test_a_target_as_what_is_trained(tiny_settings: MakeSettings) -> None:
    assert "a flow calibrates, trains" in fail(tiny_settings(training={"objective": "target"}))


def test_a_given_calibration_and_one_to_be_made_contradict(tiny_settings: MakeSettings) -> None:
    with pytest.raises(ValueError, match=r"set one of run\.calibration and run\.calibrate_again"):
        tiny_settings(run={"calibration": "cost.json", "calibrate_again": True})


def test_an_anchor_budget_that_no_sample_fits(tiny_settings: MakeSettings) -> None:
    assert "anchor" in fail(tiny_settings(batching={"anchor_budget": 1}))


def test_corrupt_store_is_named_not_trained_on(tiny_settings: MakeSettings) -> None:
    settings = tiny_settings(corpus={"max_samples": 17}, gate={"min_ktok_s": 1e6})
    train_drafter(settings, return_state=True)
    newest = max(
        (settings.run.root / "cache").glob("corpus-*"), key=lambda path: path.stat().st_mtime
    )
    (shard,) = (newest / "train").glob("shard-*.arrow")
    shard.write_bytes(shard.read_bytes()[:-100])
    assert "but its manifest says" in fail(settings)
