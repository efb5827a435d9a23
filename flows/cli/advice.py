"""The part of ``dflash-flow plan`` that needs a calibration: which split of the ranks, and why."""

import argparse
from pathlib import Path

from numpy.typing import ArrayLike
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from dflash_core.config import FrozenModel
from dflash_core.errors import CalibrationError
from dflash_core.planning import BatchingConfig, StrategyReport
from dflash_core.throughput import CostModel, Option, advise

__all__ = ["Advice", "advise_all", "read_cost_model", "show_advice"]

SHOWN = 5


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
    strategies: tuple[StrategyAdvice, ...]
    """In the order of the comparison."""


def read_cost_model(file: Path) -> CostModel:
    """Read a calibration.

    Raises:
        CalibrationError: There is none, or it is damaged.
    """
    try:
        return CostModel.model_validate_json(file.read_bytes())
    except OSError as error:
        raise CalibrationError(
            f"the calibration {file} cannot be read ({error.strerror}); make one with dflash-flow "
            "calibrate --out FILE"
        ) from None
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, problem["loc"]))
        raise CalibrationError(
            f"{file} is no calibration ({place}: {problem['msg']}); make one with dflash-flow "
            "calibrate --out FILE"
        ) from None


def advise_all(
    arguments: argparse.Namespace,
    config: BatchingConfig,
    reports: list[StrategyReport],
    lengths: ArrayLike,
    supervised: ArrayLike | None,
) -> Advice:
    """Rank splits and budgets under every strategy of the comparison."""
    cost = read_cost_model(arguments.calibration)
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
                    config.model_copy(update={"strategy": report.name, "mixing": report.mixing}),
                    cost,
                    num_ranks=arguments.gpus,
                    supervised=supervised,
                    block_size=arguments.block_size,
                    seed=arguments.seed,
                    epochs=arguments.epochs,
                )
            ),
        )
        for report in reports
    ]
    marks = cost.fingerprint
    where = (
        "an unknown machine" if marks is None else f"{marks.num_ranks} ranks of {marks.hardware}"
    )
    return Advice(num_ranks=arguments.gpus, measured_on=where, strategies=tuple(found))


def show_advice(advice: Advice) -> None:
    """Print the best options of each strategy."""
    table = Table(
        "strategy", "split", "budget", "anchors", "Ktok/s", "interval", "hours", "why", box=None
    )
    for column in table.columns[2:7]:
        column.justify = "right"
    for strategy in advice.strategies:
        for number, option in enumerate(strategy.options[:SHOWN]):
            prediction = option.prediction
            anchors = "-" if option.anchor_budget is None else f"{option.anchor_budget:,}"
            table.add_row(
                f"{strategy.name}/{strategy.mixing}" if number == 0 else "",
                option.split.label,
                f"{option.token_budget:,}",
                anchors,
                f"{prediction.ktok_s:.2f}",
                f"{prediction.low:.2f}..{prediction.high:.2f}",
                f"{prediction.device_hours:.3g}",
                option.reason,
            )
        table.add_section()
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"calibrated on {advice.measured_on}, predicted for {advice.num_ranks} ranks; hours are of "
        "all devices together"
    )
