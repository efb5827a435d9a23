"""One way to compile a loop over samples.

Compiled functions call only compiled functions of their own file: the on-disk cache follows the
file's own source, not what it imports. ``NUMBA_DISABLE_JIT=1`` runs the same code as plain Python.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

__all__ = ["compiled"]

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def compiled(function: FunctionT) -> FunctionT:
    """Compile with numba, cached on disk where some cache folder can be written."""
    try:
        return cast(FunctionT, numba.njit(cache=True)(function))
    except RuntimeError:  # a read-only installation without a home: compile in each process
        return cast(FunctionT, numba.njit(function))
