"""Fit a role's terms to measurements: non-negative, relative errors, checked on held-out cells."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from dflash_core.errors import CalibrationError
from dflash_core.throughput.cost import (
    ROLE_TERMS,
    TERMS,
    Coefficients,
    Measurement,
    Role,
    RoleFit,
)
from dflash_core.throughput.workload import Workload

__all__ = ["fit_role", "non_negative_fit"]

INSEPARABLE_CORRELATION = 0.995
ROUNDS = 12
OUTLIER = 0.05


def fit_role(measurements: Sequence[Measurement], role: Role) -> RoleFit:
    """Fit one role's terms by non-negative least squares on relative errors.

    Rounds of reweighting let a timing that another program disturbed count for less.

    Args:
        measurements: Timed shapes of any role.
        role: Which of them to fit.

    Raises:
        CalibrationError: Nothing measured, fewer cells than terms, or all times equal.
    """
    used = [m for m in measurements if m.role == role]
    amounts = Workload.of_measurements(used).amounts
    terms = [name for name in ROLE_TERMS[role] if used and amounts[name].any()]
    cells = np.array([m.cell for m in used])
    distinct = np.unique(cells)
    if distinct.size <= len(terms):
        raise CalibrationError(
            f"{distinct.size} measured {role} shapes cannot tell {len(terms)} terms apart; measure "
            f"at least {len(terms) + 1}: raise batching.token_budget or give samples of several "
            "lengths"
        )
    times = np.array([m.seconds for m in used])
    if np.ptp(times) == 0:
        raise CalibrationError(
            f"all {len(used)} {role} timings are {times[0]:g} s, whatever the shape: the clock is "
            "too coarse or the shapes are too small; raise batching.token_budget"
        )
    columns = np.stack([amounts[name] for name in terms], axis=1)
    alternatives, errors = [], []
    for cell in distinct:
        rest = cells != cell
        solution = non_negative_fit(columns[rest], times[rest])
        alternatives.append(_named(terms, solution))
        predicted = columns[~rest] @ solution
        errors.append(float(np.median(np.abs(predicted / times[~rest] - 1))))
    return RoleFit(
        coefficients=_named(terms, non_negative_fit(columns, times)),
        alternatives=tuple(alternatives),
        held_out_error=float(np.median(errors)),
        inseparable=_inseparable(columns, terms, role),
    )


def non_negative_fit(
    columns: NDArray[np.float64], times: NDArray[np.float64], *, robust: bool = True
) -> NDArray[np.float64]:
    """Return non-negative coefficients with the least relative errors.

    Args:
        columns: What each coefficient multiplies, shape ``(num_times, num_terms)``.
        times: Measured seconds, shape ``(num_times,)``, all positive.
        robust: Weigh down what lies off by more than a few percent, as Huber's loss does.
    """
    # Rows are divided by their time, so that a short micro-batch counts as much as a long one;
    # columns by their largest entry, so that the solver meets numbers of one size.
    scaled = columns / times[:, None]
    size = np.maximum(scaled.max(axis=0), 1e-300)
    scaled = scaled / size
    weights = np.ones(times.size)
    solution = np.zeros(columns.shape[1])
    for _ in range(ROUNDS if robust else 1):
        solution, _ = nnls(scaled * weights[:, None], weights)
        off = np.abs(scaled @ solution - 1)
        weights = np.sqrt(OUTLIER / np.maximum(off, OUTLIER))
    return solution / size


def _named(terms: Sequence[str], solution: NDArray[np.float64]) -> Coefficients:
    return Coefficients(**dict(zip(terms, map(float, solution), strict=True)))


def _inseparable(columns: NDArray[np.float64], terms: Sequence[str], role: Role) -> tuple[str, ...]:
    unit = columns / np.linalg.norm(columns, axis=0)
    cosine = unit.T @ unit
    return tuple(
        f"{role}: {TERMS[terms[first]]} and {TERMS[terms[second]]}"
        for first in range(len(terms))
        for second in range(first + 1, len(terms))
        if cosine[first, second] > INSEPARABLE_CORRELATION
    )
