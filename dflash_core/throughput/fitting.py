"""Fit the cost model to measurements: non-negative, relative errors, checked on held-out shapes."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from dflash_core.errors import CalibrationError
from dflash_core.throughput.cost import Coefficients, Measurement, Role

__all__ = ["Fit", "fit_coefficients"]

TERMS = ("constant_s", "slot_s", "slot_length_s", "anchor_token_s")
NAMES = {
    "constant_s": "constant",
    "slot_s": "token slots",
    "slot_length_s": "squared length",
    "anchor_token_s": "anchor tokens",
}
INSEPARABLE_CORRELATION = 0.995


class Fit:
    """Coefficients of one role, and how well they do on shapes they have not seen.

    Attributes:
        coefficients: The fitted terms.
        held_out_error: Median over shapes of |predicted - measured| / measured, each shape
            predicted from all the others.
        inseparable: Pairs of terms whose columns are all but proportional, in words.
    """

    def __init__(
        self, coefficients: Coefficients, held_out_error: float, inseparable: tuple[str, ...]
    ) -> None:
        self.coefficients = coefficients
        self.held_out_error = held_out_error
        self.inseparable = inseparable


def fit_coefficients(measurements: Sequence[Measurement], role: Role) -> Fit:
    """Fit one role's terms by non-negative least squares on relative errors.

    Args:
        measurements: Timed shapes of any role.
        role: Which of them to fit.

    Raises:
        CalibrationError: Fewer shapes than terms, or all times equal.
    """
    used = [m for m in measurements if m.role == role]
    terms = TERMS if any(m.anchor_tokens for m in used) else TERMS[:3]
    shapes = {(m.rows, m.padded_length, m.anchor_tokens) for m in used}
    if len(shapes) <= len(terms):
        raise CalibrationError(
            f"{len(shapes)} measured {role} shapes cannot tell {len(terms)} terms apart; measure "
            f"at least {len(terms) + 1}: widen calibration.lengths"
        )
    times = np.array([m.seconds for m in used])
    if np.ptp(times) == 0:
        raise CalibrationError(
            f"all {len(used)} {role} timings are {times[0]:g} s, whatever the shape; the clock is "
            "too coarse or the shapes too small: widen calibration.lengths"
        )
    columns = _columns(used)[:, : len(terms)]
    solution = _solve(columns, times)
    errors = []
    for row in range(len(used)):
        rest = np.arange(len(used)) != row
        predicted = columns[row] @ _solve(columns[rest], times[rest])
        errors.append(abs(predicted - times[row]) / times[row])
    coefficients = Coefficients(**dict(zip(terms, map(float, solution), strict=True)))
    return Fit(coefficients, float(np.median(errors)), _inseparable(columns, terms, role))


def _columns(used: Sequence[Measurement]) -> NDArray[np.float64]:
    rows = np.array([m.rows for m in used], dtype=np.float64)
    length = np.array([m.padded_length for m in used], dtype=np.float64)
    anchors = np.array([m.anchor_tokens for m in used], dtype=np.float64)
    return np.stack([np.ones_like(rows), rows * length, rows * length**2, anchors], axis=1)


def _solve(columns: NDArray[np.float64], times: NDArray[np.float64]) -> NDArray[np.float64]:
    # Rows are divided by their time, so that a short micro-batch counts as much as a long one;
    # columns by their largest entry, so that the solver meets numbers of one size.
    scaled = columns / times[:, None]
    size = np.maximum(scaled.max(axis=0), 1e-300)
    solution, _ = nnls(scaled / size, np.ones(len(times)))
    return solution / size


def _inseparable(columns: NDArray[np.float64], terms: Sequence[str], role: Role) -> tuple[str, ...]:
    unit = columns / np.linalg.norm(columns, axis=0)
    found = []
    for first in range(len(terms)):
        for second in range(first + 1, len(terms)):
            cosine = float(unit[:, first] @ unit[:, second])
            if cosine > INSEPARABLE_CORRELATION:
                found.append(f"{role}: {NAMES[terms[first]]} and {NAMES[terms[second]]}")
    return tuple(found)
