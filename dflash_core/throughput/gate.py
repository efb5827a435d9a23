"""The gate: which strategies are worth the machine, and which of them to take. Pure."""

import statistics
from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from dflash_core.config import FrozenModel, changed
from dflash_core.errors import ConfigError
from dflash_core.throughput.prediction import Prediction

__all__ = ["Candidate", "GateConfig", "GateResult", "GateVerdict", "judge", "keep_begun"]

TIE_ETA2 = 0.005
MOST_DECIMALS = 9
LEAST_PILOT_STEPS = 10  # the first two warm up; fewer than eight others say little


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
    """Steps of the pilot that decides where a prediction straddles a threshold, at least 10; 0 runs
    none."""
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
        if 0 < self.pilot_steps < LEAST_PILOT_STEPS:
            raise ValueError(
                f"pilot_steps {self.pilot_steps} is under {LEAST_PILOT_STEPS}, and the first steps "
                "of a pilot only warm up; raise gate.pilot_steps, or set it to 0 for no pilots"
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

    pace: float = Field(default=1.0, gt=0)
    """What pilots of others measured over what was predicted for them; scales this prediction."""

    @property
    def ktok_s(self) -> float:
        """Measured throughput where there was a pilot, else predicted at the pilots' pace."""
        if self.measured_ktok_s is not None:
            return self.measured_ktok_s
        return self.pace * self.prediction.ktok_s

    @property
    def interval(self) -> tuple[float, float]:
        """Lower and upper end of the predicted throughput, at the pilots' pace."""
        return self.pace * self.prediction.low, self.pace * self.prediction.high

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
    pilots: tuple[int, ...] = ()
    """Candidates that need a short real run; judge again with what it measured. Never one that had
    its pilot, so that judging ends."""


def judge(candidates: Sequence[Candidate], config: GateConfig) -> GateResult:
    """Hold each candidate against the thresholds and choose among those that pass.

    Like is compared with like: once there are pilots, other predictions count at the pilots' pace
    (the median of measured over predicted), and where the threshold is a share of the fastest, that
    one has a pilot too.

    ``most_diverse`` takes the lowest step_length_eta2; within 0.005 of it the lower length_eta2,
    then the lower pair_recurrence, then the higher throughput.

    Raises:
        ConfigError: There is no candidate.
    """
    if not candidates:
        raise ConfigError("the gate was given no strategy; name some in compare.strategies")
    candidates = _at_one_pace(candidates)
    fastest = max(range(len(candidates)), key=lambda index: candidates[index].ktok_s)
    best = candidates[fastest].ktok_s
    verdicts = tuple(
        _verdict(candidate, config, best, is_fastest=index == fastest)
        for index, candidate in enumerate(candidates)
    )
    pilots = _pilots(candidates, verdicts, config, fastest)
    passing = [index for index, verdict in enumerate(verdicts) if verdict.passed]
    if not passing:
        names = ", ".join(candidate.label for candidate in candidates)
        return GateResult(
            verdicts=verdicts,
            chosen=None,
            reason=f"rejected: none of {names} passes the gate",
            pilots=pilots,
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
        pilots=pilots,
    )


def keep_begun(result: GateResult, *, name: str, mixing: str) -> GateResult:
    """Return a result that keeps what a run to be resumed was begun with, if that passes.

    Pilots and calibrations are measured: of two that are alike another may be preferred each time,
    and a checkpoint goes on with the plan that it was trained on only.

    Args:
        result: The gate's own.
        name: Strategy that the run was begun with.
        mixing: Its mixing.
    """
    for index, verdict in enumerate(result.verdicts):
        if (verdict.name, verdict.mixing) == (name, mixing) and verdict.passed:
            if index == result.chosen:
                return result
            reason = f"{name}/{mixing} is kept, which passes and this run was begun with"
            return changed(result, {"chosen": index, "reason": reason})
    return result


def _at_one_pace(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates with predictions at the pace that pilots showed."""
    paces = [
        candidate.measured_ktok_s / candidate.prediction.ktok_s
        for candidate in candidates
        if candidate.measured_ktok_s is not None
    ]
    pace = statistics.median(paces) if paces else 1.0
    return [changed(candidate, {"pace": pace}) for candidate in candidates]


def _pilots(
    candidates: Sequence[Candidate],
    verdicts: Sequence[GateVerdict],
    config: GateConfig,
    fastest: int,
) -> tuple[int, ...]:
    """Return who needs a pilot: whoever straddles, and the one they are held against."""
    wanted = {index for index, verdict in enumerate(verdicts) if verdict.straddles}
    measured = {i for i, candidate in enumerate(candidates) if candidate.measured_ktok_s}
    if config.pilot_steps and config.min_share_of_best and (wanted or measured):
        wanted |= {fastest} - measured
    return tuple(sorted(wanted))


def _verdict(
    candidate: Candidate, config: GateConfig, best: float, *, is_fastest: bool
) -> GateVerdict:
    threshold = max(config.min_ktok_s, config.min_share_of_best * best)
    too_slow = candidate.ktok_s < threshold
    faults, others = [], _other_faults(candidate, config)
    decimals = _speed_decimals(candidate.ktok_s)
    if too_slow:
        decimals = _decimals(candidate.ktok_s, threshold, decimals)
        share = config.min_share_of_best
        relative = f" ({100 * share:.6g}% of the fastest)" if share else ""
        faults.append(f"threshold {_figure(threshold, decimals)}{relative}")
    faults += others
    speed = f"{candidate.label}: {_speed(candidate, decimals)}"
    wasted = f"{1 - candidate.padding_efficiency:.0%} of its slots are padding"
    outcome = f", {', '.join(faults)}: rejected" if faults else ": passes"
    low, high = candidate.interval
    # The fastest reaches any share of itself.
    asked = threshold > 0 and not (is_fastest and config.min_share_of_best)
    undecided = config.pilot_steps > 0 and candidate.measured_ktok_s is None and not others
    return GateVerdict(
        name=candidate.name,
        mixing=candidate.mixing,
        passed=not faults,
        straddles=undecided and asked and low <= threshold <= high,
        reason=f"{speed}{outcome}; {wasted}",
    )


def _other_faults(candidate: Candidate, config: GateConfig) -> list[str]:
    faults = []
    if candidate.padding_efficiency < config.min_padding_efficiency:
        faults.append(
            _missed(
                "padding efficiency",
                candidate.padding_efficiency,
                "under",
                config.min_padding_efficiency,
            )
        )
    if candidate.step_length_eta2 > config.max_step_eta2:
        faults.append(
            _missed("step eta2", candidate.step_length_eta2, "over", config.max_step_eta2)
        )
    if config.max_straggler is not None and candidate.straggler_factor > config.max_straggler:
        faults.append(
            _missed("straggler factor", candidate.straggler_factor, "over", config.max_straggler)
        )
    return faults


def _missed(name: str, value: float, side: str, limit: float) -> str:
    decimals = _decimals(value, limit, 3)
    return f"{name} {value:.{decimals}f} {side} {limit:.{decimals}f}"


def _decimals(value: float, limit: float, least: int) -> int:
    """Return how many decimals tell a value from the limit that it misses."""
    enough = (n for n in range(least, MOST_DECIMALS) if round(value, n) != round(limit, n))
    return next(enough, MOST_DECIMALS)


def _speed(candidate: Candidate, decimals: int | None = None) -> str:
    if decimals is None:
        decimals = _speed_decimals(candidate.ktok_s)
    if candidate.measured_ktok_s is not None:
        predicted = f"{candidate.prediction.ktok_s:,.{decimals}f}"
        return (
            f"{candidate.measured_ktok_s:,.{decimals}f} Ktok/s in a pilot ({predicted} predicted)"
        )
    low, high = candidate.interval
    interval = f"{low:,.{decimals}f}..{high:,.{decimals}f}"
    scaled = " at the pilots' pace" * (candidate.pace != 1)
    return f"{candidate.ktok_s:,.{decimals}f} Ktok/s predicted{scaled} ({interval})"


def _speed_decimals(ktok_s: float) -> int:
    return 1 if ktok_s >= 10 else 2


def _figure(value: float, decimals: int) -> str:
    """Return a number without zeros at its end."""
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


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
