"""The gate: which strategies are worth the machine, and which of them to take. Pure."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from dflash_core.config import FrozenModel
from dflash_core.errors import ConfigError
from dflash_core.throughput.prediction import Prediction

__all__ = ["Candidate", "GateConfig", "GateResult", "GateVerdict", "judge"]

TIE_ETA2 = 0.005


class GateConfig(FrozenModel):
    """What a strategy must reach, and what is preferred among those that do."""

    min_ktok_s: float = Field(default=0.0, ge=0)
    """Least predicted throughput in thousand real tokens per second."""
    min_share_of_best: float = Field(default=0.0, ge=0, le=1)
    """Least predicted throughput as a share of the fastest strategy's."""
    min_padding_efficiency: float = Field(default=0.0, ge=0, le=1)
    """Least share of token slots that hold real tokens."""
    max_step_eta2: float = Field(default=1.0, ge=0, le=1)
    """Largest share of length variance between optimizer steps."""
    max_straggler: float | None = Field(default=None, ge=1)
    """Largest mean of slowest over mean rank cost in a step."""
    pilot_steps: int = Field(default=30, ge=0)
    """Steps of the pilot that decides where a prediction straddles a threshold; 0 runs none."""
    objective: Literal["most_diverse", "fastest", "weighted"] = "most_diverse"
    """Preference among the strategies that pass."""
    diversity_weight: float = Field(default=0.5, ge=0, le=1)
    """For 'weighted': weight of diversity (1 - step eta2) against relative throughput."""

    @model_validator(mode="after")
    def _do_not_contradict(self) -> "GateConfig":
        if self.min_ktok_s and self.min_share_of_best:
            raise ValueError(
                f"min_ktok_s {self.min_ktok_s:g} is absolute and min_share_of_best "
                f"{self.min_share_of_best:g} is relative to the fastest strategy; set one of "
                "gate.min_ktok_s and gate.min_share_of_best"
            )
        if self.objective == "fastest" and self.diversity_weight != 0.5:
            raise ValueError(
                f"diversity_weight {self.diversity_weight} has no effect on objective 'fastest'; "
                "set gate.objective to 'weighted' or leave gate.diversity_weight out"
            )
        return self


class Candidate(FrozenModel):
    """A strategy as the gate sees it."""

    name: str
    """Strategy."""
    mixing: str
    """Mixing over steps and ranks."""
    prediction: Prediction
    """Its predicted throughput."""
    padding_efficiency: float
    """Real tokens over token slots."""
    length_eta2: float
    """Share of length variance between micro-batches."""
    step_length_eta2: float
    """Share of length variance between optimizer steps."""
    pair_recurrence: float
    """Chance that two samples of a micro-batch share one again in the next epoch."""
    straggler_factor: float
    """Mean over steps of slowest over mean rank cost."""
    measured_ktok_s: float | None = Field(default=None, gt=0)
    """Throughput of a pilot run, which then counts instead of the prediction."""

    @property
    def ktok_s(self) -> float:
        """Measured throughput where there was a pilot, else predicted."""
        return self.prediction.ktok_s if self.measured_ktok_s is None else self.measured_ktok_s

    @property
    def label(self) -> str:
        """Strategy and mixing."""
        return f"{self.name}/{self.mixing}"


class GateVerdict(FrozenModel):
    """What the gate says of one strategy."""

    name: str
    """Strategy."""
    mixing: str
    """Mixing."""
    passed: bool
    """Whether it reaches every threshold."""
    straddles: bool
    """Whether only a pilot run can decide: the threshold lies inside the predicted interval."""
    reason: str
    """Why, in words."""


class GateResult(FrozenModel):
    """All verdicts, and the choice."""

    verdicts: tuple[GateVerdict, ...]
    """One per candidate, in their order."""
    chosen: int | None
    """Index of the chosen candidate; none when all were rejected."""
    reason: str
    """The outcome in one sentence."""

    @property
    def pilots(self) -> tuple[int, ...]:
        """Candidates that a short real run must decide; judge again with what it measured."""
        return tuple(index for index, v in enumerate(self.verdicts) if v.straddles)


def judge(candidates: Sequence[Candidate], config: GateConfig) -> GateResult:
    """Hold each candidate against the thresholds and choose among those that pass.

    ``most_diverse`` takes the lowest step_length_eta2; within 0.005 of it the lower length_eta2,
    then the lower pair_recurrence, then the higher throughput.

    Raises:
        ConfigError: There is no candidate.
    """
    if not candidates:
        raise ConfigError("the gate was given no strategy; name some in compare.strategies")
    best = max(candidate.ktok_s for candidate in candidates)
    verdicts = tuple(_verdict(candidate, config, best) for candidate in candidates)
    passing = [index for index, verdict in enumerate(verdicts) if verdict.passed]
    if not passing:
        names = ", ".join(candidate.label for candidate in candidates)
        return GateResult(
            verdicts=verdicts, chosen=None, reason=f"rejected: none of {names} passes the gate"
        )
    chosen = _choose([candidates[index] for index in passing], config, best)
    index = passing[chosen]
    taken = candidates[index]
    return GateResult(
        verdicts=verdicts,
        chosen=index,
        reason=(
            f"{taken.label} is taken: {_preference(config)} among {len(passing)} of "
            f"{len(candidates)} that pass, {_speed(taken)}"
        ),
    )


def _verdict(candidate: Candidate, config: GateConfig, best: float) -> GateVerdict:
    prediction = candidate.prediction
    threshold = max(config.min_ktok_s, config.min_share_of_best * best)
    relative = f" ({config.min_share_of_best:.0%} of the fastest)" * (config.min_share_of_best > 0)
    too_slow = [f"threshold {threshold:.4g}{relative}"] if candidate.ktok_s < threshold else []
    others = _other_faults(candidate, config)
    speed = f"{candidate.label}: {_speed(candidate)}"
    wasted = f"{1 - candidate.padding_efficiency:.0%} of its slots are padding"
    if too_slow or others:
        reason = f"{speed}, {', '.join(too_slow + others)}: rejected; {wasted}"
    else:
        reason = f"{speed}: passes; {wasted}"
    undecided = config.pilot_steps > 0 and candidate.measured_ktok_s is None and not others
    return GateVerdict(
        name=candidate.name,
        mixing=candidate.mixing,
        passed=not (too_slow or others),
        straddles=undecided and threshold > 0 and prediction.low <= threshold <= prediction.high,
        reason=reason,
    )


def _other_faults(candidate: Candidate, config: GateConfig) -> list[str]:
    faults = []
    if candidate.padding_efficiency < config.min_padding_efficiency:
        faults.append(
            f"padding efficiency {candidate.padding_efficiency:.3f} under "
            f"{config.min_padding_efficiency:.3f}"
        )
    if candidate.step_length_eta2 > config.max_step_eta2:
        faults.append(f"step eta2 {candidate.step_length_eta2:.3f} over {config.max_step_eta2:.3f}")
    if config.max_straggler is not None and candidate.straggler_factor > config.max_straggler:
        faults.append(
            f"straggler factor {candidate.straggler_factor:.3f} over {config.max_straggler:.3f}"
        )
    return faults


def _speed(candidate: Candidate) -> str:
    if candidate.measured_ktok_s is not None:
        predicted = _figure(candidate.prediction.ktok_s)
        return f"{_figure(candidate.measured_ktok_s)} Ktok/s in a pilot ({predicted} predicted)"
    prediction = candidate.prediction
    interval = f"{_figure(prediction.low)}..{_figure(prediction.high)}"
    return f"{_figure(prediction.ktok_s)} Ktok/s predicted ({interval})"


def _figure(ktok_s: float) -> str:
    return f"{ktok_s:.1f}" if ktok_s >= 10 else f"{ktok_s:.2f}"


def _choose(candidates: Sequence[Candidate], config: GateConfig, best: float) -> int:
    order = range(len(candidates))
    if config.objective == "fastest":
        return max(order, key=lambda index: candidates[index].ktok_s)
    if config.objective == "weighted":
        weight = config.diversity_weight

        def score(index: int) -> float:
            candidate = candidates[index]
            diversity = 1 - candidate.step_length_eta2
            return weight * diversity + (1 - weight) * candidate.ktok_s / best

        return max(order, key=score)
    lowest = min(candidate.step_length_eta2 for candidate in candidates)
    tied = [i for i in order if candidates[i].step_length_eta2 <= lowest + TIE_ETA2]

    def rank(index: int) -> tuple[float, float, float]:
        candidate = candidates[index]
        return (
            candidate.length_eta2,
            candidate.pair_recurrence,
            -candidate.ktok_s,
        )

    return min(tied, key=rank)


def _preference(config: GateConfig) -> str:
    return {
        "most_diverse": "most diverse steps",
        "fastest": "fastest",
        "weighted": "best weighted score",
    }[config.objective]
