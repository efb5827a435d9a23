"""``dflash-flow train`` with real ranks on a tiny target."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest

from configs.settings import RunConfig, load_settings
from dflash_core.calibration.history import read_calibration
from dflash_core.calibration.machines import (
    PastRun,
    costs_digest,
    history_file,
    read_runs,
    remember_run,
)
from dflash_core.calibration.program import fingerprint
from dflash_core.corpus.config import PrepareConfig
from dflash_core.corpus.preparing.prepare import prepare_store
from dflash_core.corpus.stdlib import write_stdlib_chats
from dflash_core.corpus.store import TokenStore
from dflash_core.errors import ConfigError
from dflash_core.throughput import Accuracy
from dflash_core.training.config import TrainingJob
from flows.cli import EXIT_INPUT, EXIT_INTERRUPTED, main
from flows.cli.train import held
from tasks.places.run_folder import RunFolder, held_folder
from tasks.train import train
from tests.dflash_core.throughput.machines import machine
from tests.tiny import TINY_LAYER_IDS, tiny_target


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    target, chats = tiny_target(folder / "target"), folder / "chats.jsonl"
    write_stdlib_chats(chats, "held_out", most=12)
    config = PrepareConfig(max_length=128, max_reject_share=1)
    prepare_store([chats], target, folder / "store", config, workers=1)
    (folder / "run.toml").write_text(
        f"""
        [target]
        path = "target"
        layer_ids = {list(TINY_LAYER_IDS)}
        [corpus]
        source = "stdlib"
        max_length = 128
        [batching]
        strategy = "random"
        token_budget = 512
        [draft]
        num_layers = 1
        block_size = 4
        [training]
        epochs = 1
        checkpoint_every_steps = 1
        [training.topology]
        num_ranks = 1
        """
    )
    return folder


def words(parts: Path, out: Path) -> list[str]:
    config, store = str(parts / "run.toml"), str(parts / "store")
    return ["train", "--config", config, "--store", store, "--out", str(out)]


def job_of(parts: Path, run_dir: Path) -> TrainingJob:
    settings = load_settings(parts / "run.toml", [])
    return TrainingJob(
        run_dir=run_dir,
        store=parts / "store",
        target=settings.target,
        draft=settings.draft,
        loss=settings.loss,
        training=settings.training,
    )


def calibration(parts: Path, file: Path, **changes: object) -> list[str]:
    """Return words that give the cost model of a made-up machine which claims to be this one."""
    marks = fingerprint(job_of(parts, file.parent)).model_copy(update=changes)
    file.write_text(machine(fingerprint=marks).model_dump_json())
    return ["--calibration", str(file)]


def test_settings_become_a_job_and_a_drafter(parts: Path, tmp_path: Path, capsys: Any) -> None:
    cost = tmp_path / "cost.json"
    more = ["--training.epochs", "2", "--json", *calibration(parts, cost)]
    digest = costs_digest(read_calibration(cost).cost)
    for name in "abc":
        past = PastRun(run=name, calibration=digest, measured_ktok_s=1.0, predicted_ktok_s=2.0)
        remember_run(history_file(cost), past)
    assert main([*words(parts, tmp_path / "run"), *more]) == 0
    captured = capsys.readouterr()
    assert "Ktok/s (" in captured.err and "device hours" in captured.err
    assert "warning: the last 3 runs were 50% slower than predicted" in captured.err
    found = json.loads(captured.out)
    past = read_runs(history_file(cost))[3]
    assert past.run == found["run"]
    assert past.measured_ktok_s == found["accuracy"]["measured_ktok_s"]
    told = held(Accuracy.model_validate(found["accuracy"]))
    assert "Ktok/s measured" in told and "target busy" in capsys.readouterr().out
    assert found["accuracy"]["epochs"][-1]["epoch"] == 1
    assert found["accuracy"]["measured_ktok_s"] > 0
    assert (Path(found["model"]) / "model.safetensors").is_file()
    assert found["last_step"]["step"] == found["last_step"]["num_steps"]
    job = TrainingJob.model_validate_json((tmp_path / "run" / "job.json").read_bytes())
    assert (job.training.epochs, job.store) == (2, parts / "store")
    assert job.consumer_cost == machine().plan_cost(
        "colocated", block_size=4, lengths=TokenStore.open(job.store).lengths
    )


def test_a_folder_in_which_another_process_trains_is_left_alone(
    parts: Path, tmp_path: Path, capsys: Any
) -> None:
    job = job_of(parts, tmp_path / "run")
    finished = tmp_path / "job.json"
    finished.write_text(job.model_dump_json())
    with held_folder(job.run_dir, place="--out", name="--out"):
        assert main(words(parts, job.run_dir)) == EXIT_INPUT
        assert "another process is working in" in capsys.readouterr().err
        assert main(["train", "--config", str(finished)]) == EXIT_INPUT
        assert capsys.readouterr().err.endswith("or set run_dir in the job to another\n")
        with pytest.raises(ConfigError, match=r"or set run\.name to another"):  # a flow's turn
            train.fn(job, RunFolder(tmp_path, "run", RunConfig()), cast(Any, None))
    assert not (job.run_dir / "job.json").exists()


def test_a_calibration_of_another_machine_or_objective_is_refused_before_ranks_start(
    parts: Path, tmp_path: Path, capsys: Any
) -> None:
    other = calibration(parts, tmp_path / "cost.json", hardware="a GPU", target="another")
    assert main([*words(parts, tmp_path / "run"), *other]) == EXIT_INPUT
    assert "measured under other conditions: hardware 'a GPU' is not" in capsys.readouterr().err
    whole = ["--training.objective", "target", *other]
    assert main([*words(parts, tmp_path / "run"), *whole]) == EXIT_INPUT
    assert "training.objective is 'target'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_what_only_a_rank_finds_wrong_is_bad_input_too(
    parts: Path, tmp_path: Path, capsys: Any
) -> None:
    nowhere = ["--init-drafter", str(tmp_path / "nowhere")]
    assert main([*words(parts, tmp_path / "run"), *nowhere]) == EXIT_INPUT
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("dflash-flow: ") and "nowhere" in told
    assert "training failed" not in told


def test_measurements_without_held_out_samples_are_refused_before_ranks_start(
    parts: Path, tmp_path: Path, capsys: Any
) -> None:
    often = ["--training.validation.every_steps", "2"]
    assert main([*words(parts, tmp_path / "run"), *often]) == EXIT_INPUT
    assert "no held-out samples; give --held-out" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_sigterm_ends_with_the_code_for_resumable(parts: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "flows.cli", *words(parts, out), "--training.epochs", "500"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ.copy())
    for _ in range(4800):
        if (out / "metrics.jsonl").is_file() and (out / "metrics.jsonl").stat().st_size:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=100)
    assert process.returncode == EXIT_INTERRUPTED, told
    assert "the same command continues from there" in told


def test_missing_and_contradicting_options_are_named(
    parts: Path, tmp_path: Path, capsys: Any
) -> None:
    assert main(["train", "--config", str(parts / "run.toml")]) == EXIT_INPUT
    assert "--store is missing" in capsys.readouterr().err
    job = tmp_path / "job.json"
    assert main(["train", "--config", str(job), "--store", "x"]) == EXIT_INPUT
    assert "--store cannot change the finished job" in capsys.readouterr().err
    assert main(["train", "--config", str(job)]) == EXIT_INPUT
    assert "cannot be read" in capsys.readouterr().err
