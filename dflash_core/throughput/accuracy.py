"""Afterwards: how far was the prediction off, per epoch and stage, and what does that teach?"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import Field

from dflash_core.config import FrozenModel
from dflash_core.errors import DataError
from dflash_core.throughput.prediction import Prediction

__all__ = ["Accuracy", "Drift", "EpochAccuracy", "hold_against", "learn_drift", "measured_ktok_s"]

WARM_UP_SHARE = 0.05
WARM_UP_STEPS = 2
PRIOR_DRIFT = 0.05
PRIOR_RUNS = 2
RECENT_RUNS = 20
DRIFT_LIMIT = 0.1
DRIFT_RUNS = 3


class EpochAccuracy(FrozenModel):
    """One epoch, measured and predicted."""

    epoch: int
    """Epoch, from 0."""
    num_steps: int
    """Steps that were measured."""
    measured_ktok_s: float
    """Real tokens per second, in thousands."""
    predicted_ktok_s: float
    """What had been predicted."""
    error: float
    """(predicted - measured) / measured."""
    inside: bool
    """Whether the measured value lies in the predicted interval."""
    measured_busy: dict[str, float] = Field(default_factory=dict)
    """Share of the time that each stage's ranks worked."""
    predicted_busy: dict[str, float] = Field(default_factory=dict)
    """What had been predicted."""


class Accuracy(FrozenModel):
    """A run held against its prediction."""

    epochs: tuple[EpochAccuracy, ...]
    """Each epoch."""
    measured_ktok_s: float
    """Over all measured steps."""
    predicted_ktok_s: float
    """What had been predicted."""

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted_ktok_s / self.measured_ktok_s - 1

    @property
    def inside(self) -> bool:
        """Whether every epoch lies in its predicted interval."""
        return all(epoch.inside for epoch in self.epochs)


class Drift(FrozenModel):
    """What past runs teach about a machine."""

    num_runs: int
    """Runs that were held against their predictions."""
    drift: float
    """Share by which a next run may stray from its prediction."""
    bias: float
    """Median of measured / predicted - 1 of the last three runs."""
    warning: str = ""
    """Why the calibration should be made again; empty while it holds."""


def hold_against(lines: Sequence[Mapping[str, Any]], prediction: Prediction) -> Accuracy:
    """Compare what training measured with what was predicted.

    The first steps of the run warm up caches and allocators and are left out.

    Args:
        lines: The run's ``metrics.jsonl``, in order.
        prediction: Made before the run.

    Raises:
        DataError: The run has no steps.
    """
    steady = _steady(lines)
    numbers = sorted({int(line["epoch"]) for line in steady})
    epochs = [[line for line in steady if line["epoch"] == number] for number in numbers]
    return Accuracy(
        epochs=tuple(
            _epoch(lines, prediction.of_epoch(number))
            for number, lines in zip(numbers, epochs, strict=True)
        ),
        measured_ktok_s=_ktok_s(steady),
        predicted_ktok_s=_predicted_ktok_s(steady, prediction),
    )


def measured_ktok_s(lines: Sequence[Mapping[str, Any]]) -> float:
    """Return the throughput of a run in thousand real tokens per second, warm-up left out.

    Raises:
        DataError: The run has no steps.
    """
    return _ktok_s(_steady(lines))


def _steady(lines: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    if not lines:
        raise DataError("the run has no steps to hold against its prediction; train at least one")
    warm_up = max(int(len(lines) * WARM_UP_SHARE), WARM_UP_STEPS)
    return lines[min(warm_up, len(lines) - 1) :]


def _epoch(lines: Sequence[Mapping[str, Any]], prediction: Prediction) -> EpochAccuracy:
    measured = _ktok_s(lines)
    seconds = sum(line["step_s"] for line in lines)
    shares: dict[str, float] = {}
    for line in lines:
        for stage, share in line.get("busy_shares", {}).items():
            shares[stage] = shares.get(stage, 0.0) + share * line["step_s"] / seconds
    return EpochAccuracy(
        epoch=int(lines[0]["epoch"]),
        num_steps=len(lines),
        measured_ktok_s=measured,
        predicted_ktok_s=prediction.ktok_s,
        error=prediction.ktok_s / measured - 1,
        inside=prediction.low <= measured <= prediction.high,
        measured_busy=shares,
        predicted_busy={
            "prefetch": prediction.prefetch_busy,
            "target": prediction.target_busy,
            "draft": prediction.draft_busy,
        },
    )


def _ktok_s(lines: Sequence[Mapping[str, Any]]) -> float:
    return sum(line["real_tokens"] for line in lines) / sum(line["step_s"] for line in lines) / 1000


def _predicted_ktok_s(lines: Sequence[Mapping[str, Any]], prediction: Prediction) -> float:
    """Return tokens over predicted seconds of these very steps."""
    tokens = sum(line["real_tokens"] for line in lines)
    return tokens / sum(
        line["real_tokens"] / prediction.of_epoch(int(line["epoch"])).ktok_s for line in lines
    )


def learn_drift(ratios: Sequence[float], *, prior: float = PRIOR_DRIFT) -> Drift:
    """Return how far runs on a machine stray from their predictions.

    When the last three runs all lie off by more than a tenth to the same side, the machine is no
    longer the calibrated one.

    Args:
        ratios: Measured / predicted throughput of past runs, oldest first, all positive.
        prior: Stands in for two runs.
    """
    logs = np.log(np.asarray(ratios, dtype=np.float64))[-RECENT_RUNS:]
    squares = PRIOR_RUNS * prior**2 + float((logs**2).sum())
    drift = math.sqrt(squares / (PRIOR_RUNS + logs.size))
    last = np.expm1(logs[-DRIFT_RUNS:])
    bias = float(np.median(last)) if last.size else 0.0
    warning = ""
    if last.size == DRIFT_RUNS and ((last < -DRIFT_LIMIT).all() or (last > DRIFT_LIMIT).all()):
        side = "slower" if bias < 0 else "faster"
        warning = (
            f"the last {DRIFT_RUNS} runs were {abs(bias):.0%} {side} than predicted; calibrate "
            "this machine again with dflash-flow calibrate --again (and --out FILE where runs are "
            "given one), or set run.calibrate_again"
        )
    return Drift(num_runs=int(logs.size), drift=drift, bias=bias, warning=warning)
