"""The part of ``dflash-flow plan`` that needs a calibration: which split of the ranks, and why."""

import argparse
from pathlib import Path

from numpy.typing import ArrayLike
from rich.table import Table

from dflash_core.calibration.history import Calibration, read_calibration
from dflash_core.config import FrozenModel, changed
from dflash_core.errors import CalibrationError, ConfigError
from dflash_core.planning import BatchingConfig, StrategyReport
from dflash_core.throughput import CostModel, Option, advise
from tasks.terminal import Terminal

__all__ = ["Advice", "advise_all", "show_advice"]


class StrategyAdvice(FrozenModel):
    """Options under one strategy."""

    name: str
    """Strategy."""
    mixing: str
    """Mixing."""
    options: tuple[Option, ...]
    """Best first."""


class Advice(FrozenModel):
    """Options of every strategy."""

    num_ranks: int
    """Ranks that are divided."""
    measured_on: str
    """Where the calibration comes from, in words."""
    caution: str = ""
    """What the calibration cannot know of the ranks that are divided; empty when it can."""
    warning: str = ""
    """Why the calibration should be made again; empty while it holds."""
    strategies: tuple[StrategyAdvice, ...]
    """In the order of the comparison."""


def advise_all(
    arguments: argparse.Namespace,
    config: BatchingConfig,
    reports: list[StrategyReport],
    lengths: ArrayLike,
    supervised: ArrayLike | None,
) -> Advice:
    """Rank splits and budgets under every strategy of the comparison."""
    if arguments.epochs < 1:
        raise ConfigError(f"--epochs is {arguments.epochs}; give at least 1")
    calibration, where, block_size = _calibration(arguments)
    cost = calibration.cost
    if supervised is None:
        raise CalibrationError(
            f"{arguments.data} has lengths without supervised tokens, which the drafter's cost "
            "needs; give a token store, or lengths with a column 'supervised'"
        )
    found = [
        StrategyAdvice(
            name=report.name,
            mixing=report.mixing,
            options=tuple(
                advise(
                    lengths,
                    changed(config, {"strategy": report.name, "mixing": report.mixing}),
                    cost,
                    num_ranks=arguments.gpus,
                    supervised=supervised,
                    block_size=block_size,
                    seed=arguments.seed,
                    epochs=arguments.epochs,
                )
            ),
        )
        for report in reports
    ]
    return Advice(
        num_ranks=arguments.gpus,
        measured_on=where,
        caution=_caution(cost, arguments.gpus),
        warning=calibration.learnt.warning,
        strategies=tuple(found),
    )


def _caution(cost: CostModel, num_ranks: int) -> str:
    if num_ranks == 1 or cost.fingerprint is None or cost.fingerprint.num_ranks > 1:
        return ""
    return (
        "calibrated on one rank, so that summing gradients, sending features and waiting for the "
        f"slowest are missing: {num_ranks} ranks will be slower than this; calibrate with "
        "training.topology.num_ranks of at least 2"
    )


def _calibration(arguments: argparse.Namespace) -> tuple[Calibration, str, int]:
    """Return the calibration, where it was measured, and the drafter's block size.

    Raises:
        CalibrationError: It was measured on another machine or for another drafter.
    """
    from dflash_core.calibration.program import hardware_of, versions_here
    from dflash_core.training.config import TrainingConfig
    from dflash_core.training.ranks.groups import device_of

    file: Path = arguments.calibration
    calibration = read_calibration(file)
    marks = calibration.cost.fingerprint
    if marks is None:
        raise CalibrationError(
            f"{file} does not say what it was measured on; make one with dflash-flow calibrate "
            "--out FILE"
        )
    devices = [hardware_of(device_of(TrainingConfig(device=name))) for name in ("auto", "cpu")]
    for measured, present in ((marks.hardware, devices), (marks.versions, [versions_here()])):
        if measured not in present and not arguments.elsewhere:
            raise CalibrationError(
                f"{file} was measured on '{measured}' and this machine is '{present[0]}'; "
                "calibrate here, or add --elsewhere to plan for that machine"
            )
    if arguments.block_size not in (None, marks.block_size):
        raise CalibrationError(
            f"{file} was measured with a block size of {marks.block_size}, not "
            f"{arguments.block_size}; calibrate for that drafter, or leave --block-size out"
        )
    return calibration, f"{marks.num_ranks} ranks of {marks.hardware}", marks.block_size


def _best_of_splits(options: tuple[Option, ...]) -> list[Option]:
    best: dict[str, Option] = {}
    for option in options:
        best.setdefault(option.split.label, option)
    return list(best.values())


def show_advice(advice: Advice) -> None:
    """Print the best budgets of every split, under each strategy."""
    console = Terminal()
    for strategy in advice.strategies:
        options = _best_of_splits(strategy.options)
        table = Table("split", "budget", "anchors", "Ktok/s", "interval", "hours", box=None)
        for column in table.columns[1:]:
            column.justify = "right"
        for option in options:
            prediction = option.prediction
            table.add_row(
                option.split.label,
                f"{option.token_budget:,}",
                "-" if option.anchor_budget is None else f"{option.anchor_budget:,}",
                f"{prediction.ktok_s:.2f}",
                f"{prediction.low:.2f}..{prediction.high:.2f}",
                f"{prediction.device_hours:.3g}",
            )
        console.print(f"{strategy.name}/{strategy.mixing}")
        console.print(table)
        for option in options:
            console.print(f"  {option.split.label}: {option.reason}")
        console.print()
    strategy, best = max(
        ((s, s.options[0]) for s in advice.strategies), key=lambda one: one[1].prediction.ktok_s
    )
    console.print(
        f"fastest: {strategy.name}/{strategy.mixing} on {best.split.label} with a budget of "
        f"{best.token_budget:,}, {best.prediction.ktok_s:.2f} Ktok/s; {best.reason}"
    )
    console.print(
        f"calibrated on {advice.measured_on}, predicted for {advice.num_ranks} ranks; hours are of "
        "all devices together"
    )
    for sentence in filter(None, (advice.caution, advice.warning)):
        console.print(sentence)
