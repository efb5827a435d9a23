"""Held-out measurements while training: teacher-forced loss, forgetting, real acceptance."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_core.training.batches.length_groups import NUM_GROUPS
from dflash_core.training.batches.schedule import Epochs, Work
from dflash_core.training.config import ValidationConfig
from dflash_core.training.features.pipeline import Pipeline
from dflash_core.training.objectives.base import Objective
from dflash_core.training.ranks.groups import Ranks
from dflash_core.training.telemetry.forgetting import LAGS, forgotten_groups

__all__ = ["Measured", "Validation"]


@dataclass(frozen=True)
class Measured:
    """One measurement.

    Attributes:
        metrics: What goes into the step's line.
        score: How good the model is, None when this measurement does not decide; more is better.
    """

    metrics: dict[str, Any]
    score: float | None


class Validation:
    """Measures the model on the same held-out samples again and again.

    Args:
        config: What is measured when.
        epochs: Which samples.
        objective: How.
        groups: Length group of each held-out sample.
        ranks: This process among the others.
        accept: Decodes prompts with the model on rank 0 and returns the acceptance length there;
            all consuming ranks call it. Calls what it is given after every verification.
    """

    def __init__(
        self,
        config: ValidationConfig,
        epochs: Epochs,
        objective: Objective,
        groups: NDArray[np.int64] | None,
        ranks: Ranks,
        accept: Callable[[Callable[[], None]], float] | None = None,
    ) -> None:
        self._config = config
        self._epochs = epochs
        self._objective = objective
        self._groups = groups
        self._ranks = ranks
        self._accept = accept
        self._history: list[NDArray[np.float64]] = []

    @torch.no_grad()
    def measure(self, step: int, works: Sequence[Work | None], pipeline: Pipeline) -> Measured:
        """Measure after a step; every consuming rank calls this.

        Args:
            step: The step, from 0.
            works: This rank's held-out micro-batches, None where it only helps others.
            pipeline: Gives their features.
        """
        assert self._groups is not None
        num_samples = len(self._groups)
        sums = torch.zeros(self._objective.num_sums, dtype=torch.float64)
        by_sample = torch.zeros(num_samples, 2, dtype=torch.float64)
        for ready in pipeline.follow(works, self._objective.idle):
            micro_batch = ready.work.micro_batch
            samples = micro_batch.samples
            groups = torch.from_numpy(self._groups[samples])
            outcome = self._objective.run(micro_batch, ready.batch, ready.features_MF, groups)
            sums += outcome.sums
            by_sample[samples] += outcome.by_sample
        shared = torch.cat([sums, by_sample.flatten()]).to(self._ranks.device)
        what = f"the held-out samples of step {step + 1}"
        shared = self._ranks.add(shared, what=what).cpu()
        sums, by_sample = shared[: len(sums)], shared[len(sums) :].view(-1, 2)
        return self._judge(step, sums, by_sample)

    def _judge(self, step: int, sums: torch.Tensor, by_sample: torch.Tensor) -> Measured:
        assert self._groups is not None
        described = self._objective.describe(sums)
        losses, weights = by_sample.numpy().T
        with np.errstate(invalid="ignore", divide="ignore"):
            self._history.append(losses / weights)  # samples that are not measured stay nan
        del self._history[: -(max(LAGS) + 1)]
        metrics: dict[str, Any] = {
            f"held_out_{name}": described[name]
            for name in ("loss", "accuracy", "expected_acceptance")
            if name in described
        }
        totals = [
            (losses[self._groups == group].sum(), weights[self._groups == group].sum())
            for group in range(NUM_GROUPS)
        ]
        metrics["held_out_loss_by_group"] = [
            loss / weight if weight > 0 else None for loss, weight in totals
        ]
        metrics["forgotten_groups"] = forgotten_groups(
            self._history, self._groups, false_alarm_rate=self._config.false_alarm_rate
        )
        every = self._config.accept_every_steps
        if every is None:
            finite = math.isfinite(described["loss"])
            return Measured(metrics, self._objective.score(sums) if finite else None)
        if (step + 1) % every and step + 1 != self._epochs.num_steps:
            return Measured(metrics, None)
        tau = self._acceptance(step)
        return Measured(metrics | {"held_out_acceptance": tau}, tau)

    def _acceptance(self, step: int) -> float:
        assert self._accept is not None
        what = f"the acceptance after step {step + 1}"
        with self._ranks.first_alone(what=what) as heartbeat:
            found = torch.tensor([self._accept(heartbeat)], dtype=torch.float64)
        found = self._ranks.add(found.to(self._ranks.device), what=what)
        return float(found) if math.isfinite(float(found)) else 0.0

    def state(self) -> list[list[float]]:
        """Return what a resumed run needs to go on alike."""
        return [losses.tolist() for losses in self._history]

    def load(self, state: list[list[float]]) -> None:
        """Go on from a state."""
        self._history = [np.array(losses, dtype=np.float64) for losses in state]
