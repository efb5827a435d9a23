"""Is a jumpy loss diverse batches or divergence? The loss, adjusted for what a step held.

Long samples and late block positions have other losses than short samples and early positions, so
the raw loss moves with the composition of a step. Running means of the loss per length group and
block position, weighted by the step's own weights, give the loss *expected* of its composition;
``adjusted = raw - expected + overall``, where ``overall`` weights the same means by the running
composition. Means come from earlier steps only, and forget, so that they follow the training.

The *explained share* is the share of the raw loss's variance around ``overall`` that ``expected``
takes away, over the last steps. A trend moves raw but not ``expected - overall``, so divergence
explains nothing.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Adjusted", "CompositionMonitor"]

HALF_LIFE = 20.0
WINDOW = 200
LEAST_STEPS = 20


@dataclass(frozen=True)
class Adjusted:
    """One step's loss, read against its composition.

    Attributes:
        expected: Loss that the step's composition leads one to expect.
        adjusted: Loss as it would be with the usual composition.
        explained_share: Share of the variance of recent losses that composition explains, in
            [0, 1]; None until there are enough steps.
    """

    expected: float
    adjusted: float
    explained_share: float | None


class CompositionMonitor:
    """Keeps running means of loss by length group and position.

    Args:
        half_life: Steps after which a step counts half.
        window: Steps that the explained share looks back.
    """

    def __init__(self, *, half_life: float = HALF_LIFE, window: int = WINDOW) -> None:
        self._keep = 0.5 ** (1.0 / half_life)
        self._loss: NDArray[np.float64] | None = None
        self._weight: NDArray[np.float64] | None = None
        self._steps = 0
        self._pairs: deque[tuple[float, float]] = deque(maxlen=window)

    def observe(self, loss_GK: NDArray[np.float64], weight_GK: NDArray[np.float64]) -> Adjusted:
        """Take in one step's sums and judge its loss by the steps before.

        Args:
            loss_GK: Sum of weighted losses, shape ``(groups, positions)``.
            weight_GK: Sum of weights, same shape.
        """
        total = float(weight_GK.sum())
        raw = float(loss_GK.sum()) / total if total > 0 else float("nan")
        if self._loss is None or self._weight is None or not np.isfinite(raw):
            if np.isfinite(raw):
                self._loss, self._weight, self._steps = loss_GK.copy(), weight_GK.copy(), 1
            return Adjusted(raw, raw, self._share())
        overall = float(self._loss.sum() / self._weight.sum())
        seen = self._weight > 0
        means = np.where(seen, self._loss / np.where(seen, self._weight, 1.0), overall)
        expected = float((weight_GK * means).sum()) / total
        if self._steps >= LEAST_STEPS:
            self._pairs.append((raw - overall, expected - overall))
        self._loss = self._loss * self._keep + loss_GK
        self._weight = self._weight * self._keep + weight_GK
        self._steps += 1
        return Adjusted(expected, raw - expected + overall, self._share())

    def state(self) -> dict[str, object]:
        """Return what a resumed run needs to go on alike."""
        return {
            "loss": None if self._loss is None else self._loss.tolist(),
            "weight": None if self._weight is None else self._weight.tolist(),
            "steps": self._steps,
            "pairs": [list(pair) for pair in self._pairs],
        }

    def load(self, state: dict[str, object]) -> None:
        """Go on from a state."""
        loss, weight = state["loss"], state["weight"]
        self._loss = None if loss is None else np.array(loss, dtype=np.float64)
        self._weight = None if weight is None else np.array(weight, dtype=np.float64)
        self._steps = int(state["steps"])  # type: ignore[call-overload]
        self._pairs.clear()
        self._pairs.extend((raw, offset) for raw, offset in state["pairs"])  # type: ignore[attr-defined]

    def _share(self) -> float | None:
        if len(self._pairs) < LEAST_STEPS:
            return None
        raw, offset = np.array(self._pairs).T
        variance = float(raw.var())
        if variance <= 0:
            return 0.0
        return float(np.clip(1.0 - (raw - offset).var() / variance, 0.0, 1.0))
