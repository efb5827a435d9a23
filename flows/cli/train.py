"""``dflash-flow train``: the torchrun program on this machine, watched over."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from configs.settings import RunConfig, load_settings
from dflash_core.artifacts import atomic_write
from dflash_core.calibration.history import Calibration, balanced, hold_job, read_calibration
from dflash_core.corpus.store import TokenStore
from dflash_core.errors import ConfigError
from dflash_core.throughput import Accuracy, CostModel, Prediction, predict
from dflash_core.training.config import TrainingJob, check_job
from flows.cli import first_problem
from flows.cli.run import print_table
from tasks.launching.torchrun import run_torchrun
from tasks.places.run_folder import held_folder
from tasks.terminal import Terminal

__all__ = ["TAKES_SETTINGS", "add_arguments", "held", "run"]

TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--config",
        type=Path,
        required=True,
        metavar="FILE",
        help="settings (.toml, with --store and --out) or the job.json of an earlier run",
    )
    parser.add_argument("--store", type=Path, metavar="DIR", help="token store to train on")
    parser.add_argument("--held-out", type=Path, metavar="DIR", help="token store for validation")
    parser.add_argument("--out", type=Path, metavar="DIR", help="run folder; the same resumes")
    parser.add_argument("--init-drafter", type=Path, metavar="DIR", help="drafter to start from")
    parser.add_argument(
        "--only-features",
        action="store_true",
        help="capture the target's features into the cache and train nothing",
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="cost model of dflash-flow calibrate: predict Ktok/s and balance ranks by it",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Train until the end, or until asked to stop.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM came; the same command continues.
        TrainingError: A rank failed.
    """
    job, limits = (_read_job if arguments.config.suffix == ".json" else _make_job)(arguments)
    check_job(job)
    calibration = prediction = accuracy = None
    if arguments.calibration is not None:
        calibration = _calibration(job, arguments.calibration)
        job, prediction = _predicted(job, calibration.cost)
    more = ["--only-features"] if arguments.only_features else []
    setting = "run_dir in the job" if arguments.config.suffix == ".json" else "--out"
    with held_folder(job.run_dir, place=setting, name=setting):
        file = atomic_write(job.run_dir / "job.json", job.model_dump_json(indent=1) + "\n")
        last = _train(job, limits, file, *more)
    if arguments.only_features:
        found = {"features": str(job.training.cache.path)}
        sys.stdout.write((json.dumps(found) if arguments.json else found["features"]) + "\n")
        return 0
    model = job.run_dir / ("drafter" if job.training.objective == "draft" else "target")
    if calibration is not None and prediction is not None:
        accuracy = hold_job(job, prediction, calibration, on_warning=_warn)
    if arguments.json:
        found = {"run": str(job.run_dir), "model": str(model), "last_step": last}
        if accuracy is not None:
            found["accuracy"] = accuracy.model_dump(mode="json")
        sys.stdout.write(json.dumps(found) + "\n")
        return 0
    loss = last.get("loss")
    told = f"loss {loss:.3f} after {last['step']:,} steps" if loss is not None else "trained"
    if accuracy is not None:
        told += held(accuracy)
    Terminal().print(f"{told}\n{model}", soft_wrap=True)
    return 0


def held(accuracy: Accuracy) -> str:
    """Show each epoch and stage against the prediction; return the whole in words."""
    from dflash_core.reporting import accuracy_table

    print_table(accuracy_table(accuracy))
    return (
        f", {accuracy.measured_ktok_s:.2f} Ktok/s measured, {accuracy.predicted_ktok_s:.2f} "
        f"predicted ({accuracy.error:+.1%})"
    )


def _calibration(job: TrainingJob, file: Path) -> Calibration:
    """Return a calibration with what runs taught since.

    Raises:
        CalibrationError: It is of another machine or model.
    """
    from dflash_core.calibration.program import fingerprint

    if job.training.objective == "target":
        raise ConfigError(
            "--calibration knows what a drafter costs, and training.objective is 'target'; leave "
            "it out"
        )
    found = read_calibration(file)
    found.cost.require(fingerprint(job))
    if found.learnt.warning:
        _warn(found.learnt.warning)
    return found


def _predicted(job: TrainingJob, cost: CostModel) -> tuple[TrainingJob, Prediction]:
    """Return the job, balanced by a calibration, and what that says of the run."""
    from dflash_core.training.batches.schedule import Epochs

    store = TokenStore.open(job.store)
    job = balanced(job, cost, store.lengths)
    prediction = predict(
        Epochs(job, store, None).plan(0),
        cost,
        block_size=job.draft.block_size,
        topology=job.training.topology,
        epochs=job.training.epochs,
        max_steps=job.training.max_steps,
        features=job.training.features,
    )
    Terminal(stderr=True).print(
        f"predicted {prediction.ktok_s:.2f} Ktok/s ({prediction.low:.2f}..{prediction.high:.2f}), "
        f"{prediction.step_s:.3g} s a step, {prediction.run_s / 60:,.1f} minutes, "
        f"{prediction.device_hours:.3g} device hours; {prediction.bottleneck} binds"
    )
    return job, prediction


def _warn(text: str) -> None:
    Terminal(stderr=True).print(f"warning: {text}", soft_wrap=True)


def _read_job(arguments: argparse.Namespace) -> tuple[TrainingJob, RunConfig]:
    given = [name for name in ("store", "held_out", "out", "init_drafter") if vars(arguments)[name]]
    if given or arguments.overrides:
        what = f"--{given[0].replace('_', '-')}" if given else arguments.overrides[0]
        raise ConfigError(
            f"{what} cannot change the finished job {arguments.config}; edit that file, or give "
            "settings as .toml"
        )
    try:
        return TrainingJob.model_validate_json(arguments.config.read_bytes()), RunConfig()
    except OSError as error:
        raise ConfigError(
            f"{arguments.config} cannot be read ({error.strerror}); give an existing file with "
            "--config"
        ) from None
    except ValidationError as error:
        raise ConfigError(f"{arguments.config}: {first_problem(error)}") from None


def _make_job(arguments: argparse.Namespace) -> tuple[TrainingJob, RunConfig]:
    for name in ("store", "out"):
        if vars(arguments)[name] is None:
            raise ConfigError(f"--{name} is missing; settings in .toml need --store and --out")
    settings = load_settings(arguments.config, arguments.overrides)
    job = TrainingJob(
        run_dir=arguments.out.resolve(),
        store=arguments.store.resolve(),
        held_out_store=arguments.held_out and arguments.held_out.resolve(),
        target=settings.target,
        draft=settings.draft,
        loss=settings.loss,
        batching=settings.batching,
        training=settings.training,
        init_drafter=arguments.init_drafter and arguments.init_drafter.resolve(),
    )
    return job, settings.run


def _train(job: TrainingJob, limits: RunConfig, file: Path, *options: str) -> dict[str, Any]:
    """Run the ranks with a bar on standard error; return the last step's metrics."""
    last: dict[str, Any] = {}
    console = Terminal(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("steps", total=None)

        def on_metrics(lines: list[dict[str, Any]]) -> None:
            last.clear()
            last.update(lines[-1])
            bars.update(bar, completed=last["step"], total=last["num_steps"])

        run_torchrun(
            "dflash_core.training",
            ["--config", str(file), *options],
            num_ranks=job.training.topology.num_ranks,
            run_dir=job.run_dir,
            threads_per_rank=job.training.threads_per_rank,
            config=limits,
            on_line=lambda line: console.print(line, soft_wrap=True),
            on_metrics=on_metrics,
        )
    return last
