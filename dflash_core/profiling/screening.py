"""One policy for lengths that cannot be used, shared by profile and planner."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dflash_core.errors import ConfigError, DataError

__all__ = [
    "ABSURD_LENGTH",
    "BAD_KINDS",
    "Oversize",
    "Screened",
    "check_max_length",
    "screen_lengths",
]

ABSURD_LENGTH = 2**31 - 1
"""No sample has this many tokens: such values are sentinels."""

BAD_KINDS: tuple[str, ...] = ("null", "zero", "negative", "absurd", "oversize")

Oversize = Literal["error", "truncate", "drop"]

_FIXES = {
    "null": "set oversize to 'drop' to leave such samples out",
    "zero": "set oversize to 'drop' to leave such samples out",
    "negative": "set oversize to 'drop' to leave such samples out",
    "absurd": "set oversize to 'drop' to leave such samples out",
    "oversize": "raise {setting} or set oversize to 'truncate' or 'drop'",
}


@dataclass(frozen=True)
class Screened:
    """Lengths that can be used, and what became of the others.

    Attributes:
        lengths: Usable lengths in tokens, int32, shape ``(num_kept,)``.
        kept: Positions of these in the input, shape ``(num_kept,)``; None when all were kept.
        bad: Samples of each bad kind that were found, keys `BAD_KINDS`.
        num_dropped: Samples left out.
        num_truncated: Samples shortened to the maximum.
    """

    lengths: NDArray[np.int32]
    kept: NDArray[np.int64] | None
    bad: dict[str, int]
    num_dropped: int
    num_truncated: int

    def select(self, values: ArrayLike) -> NDArray[np.int64]:
        """Return per-sample values of the kept samples, int64."""
        array = np.asarray(values, dtype=np.int64)
        return array if self.kept is None else array[self.kept]


def screen_lengths(
    lengths: ArrayLike,
    *,
    max_length: int | None = None,
    oversize: Oversize = "error",
    setting: str = "max_length",
) -> Screened:
    """Apply the policy for missing, zero, negative, absurd and over-long lengths.

    Over-long samples are refused, truncated to ``max_length``, or dropped. The other bad kinds
    have no length to truncate: they are refused under ``error`` and dropped otherwise.

    Args:
        lengths: Sequence lengths in tokens, shape ``(num_samples,)``; None and NaN are missing.
        max_length: Longest usable sample; only `ABSURD_LENGTH` bounds it when not given.
        oversize: The policy.
        setting: Name of the setting behind ``max_length``, for the error text.

    Raises:
        ConfigError: ``max_length`` leaves no length.
        DataError: Not a list of whole numbers, or a bad length under ``error``.

    Example:
        >>> screen_lengths([3, 0, 9], max_length=5, oversize="truncate").lengths
        array([3, 5], dtype=int32)
    """
    check_max_length(max_length)
    values, missing = _whole_numbers(lengths)
    if missing is None and values.size and _all_usable(values, max_length):
        return Screened(values.astype(np.int32), None, dict.fromkeys(BAD_KINDS, 0), 0, 0)
    kinds = _kinds(values, missing, max_length)
    bad = {kind: int(np.count_nonzero(mask)) for kind, mask in kinds.items()}
    if oversize == "error":
        _refuse(values, kinds, bad, max_length, setting)
    drop = np.zeros(values.shape, dtype=np.bool_)
    for kind, mask in kinds.items():
        if kind != "oversize" or oversize == "drop":
            drop |= mask
    kept = np.flatnonzero(~drop)
    usable = values[kept]
    if max_length is not None:
        usable = np.minimum(usable, max_length)
    return Screened(
        lengths=usable.astype(np.int32),
        kept=None if kept.size == values.size else kept,
        bad=bad,
        num_dropped=int(values.size - kept.size),
        num_truncated=bad["oversize"] if oversize == "truncate" else 0,
    )


def check_max_length(max_length: int | None) -> None:
    """Refuse a maximum that no sample can have."""
    if max_length is not None and max_length < 1:
        raise ConfigError(f"max_length is {max_length:,}; give at least 1")


def _whole_numbers(lengths: ArrayLike) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
    array = np.asarray(lengths)
    if array.ndim != 1:
        raise DataError(f"lengths have shape {array.shape}; give one number per sample")
    missing = None
    if array.dtype == object:
        array, missing = _from_objects(array)
    if array.dtype.kind == "f":
        missing = np.isnan(array)
        if not np.array_equal(array[~missing], np.floor(array[~missing])):
            index = int(np.flatnonzero(~missing & (array != np.floor(array)))[0])
            raise DataError(f"sample {index} has a length of {array[index]}; give whole numbers")
        bound = float(ABSURD_LENGTH) + 1
        bounded = np.where(missing, 0, np.clip(array, -bound, bound))
        array = bounded.astype(np.int64)
    if array.size and array.dtype.kind not in "iu":
        raise DataError(f"lengths are of type {array.dtype}; give whole numbers")
    return array, missing if missing is not None and missing.any() else None


def _from_objects(array: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    # Python integers may exceed 64 bits and floats may be NaN, so each is bounded on its own.
    missing = np.array([value is None or value != value for value in array], dtype=np.bool_)
    whole = np.zeros(array.shape, dtype=np.int64)
    for index in np.flatnonzero(~missing):
        value = array[index]
        if not isinstance(value, int | float | np.integer | np.floating) or value != value // 1:
            raise DataError(f"sample {index} has a length of {value!r}; give whole numbers")
        whole[index] = int(max(min(value, ABSURD_LENGTH + 1), -ABSURD_LENGTH))
    return whole, missing


def _all_usable(values: NDArray[Any], max_length: int | None) -> bool:
    limit = ABSURD_LENGTH - 1 if max_length is None else min(max_length, ABSURD_LENGTH - 1)
    return bool(values.min() >= 1 and values.max() <= limit)


def _kinds(
    values: NDArray[Any], missing: NDArray[np.bool_] | None, max_length: int | None
) -> dict[str, NDArray[np.bool_]]:
    null = np.zeros(values.shape, dtype=np.bool_) if missing is None else missing
    absurd = values >= ABSURD_LENGTH
    over = np.zeros(values.shape, dtype=np.bool_) if max_length is None else values > max_length
    return {
        "null": null,
        "zero": (values == 0) & ~null,
        "negative": (values < 0) & ~null,
        "absurd": absurd & ~null,
        "oversize": over & ~absurd & ~null,
    }


def _refuse(
    values: NDArray[Any],
    kinds: dict[str, NDArray[np.bool_]],
    bad: dict[str, int],
    max_length: int | None,
    setting: str,
) -> None:
    for kind, mask in kinds.items():
        if not bad[kind]:
            continue
        index = int(np.flatnonzero(mask)[0])
        what = "no length" if kind == "null" else f"{int(values[index]):,} tokens"
        limit = (
            f"but {setting} is {max_length:,}"
            if kind == "oversize"
            else f"but a usable length is 1 to {ABSURD_LENGTH - 1:,}"
        )
        others = f" ({bad[kind]:,} samples are {kind})" if bad[kind] > 1 else ""
        raise DataError(
            f"sample {index} has {what} {limit}{others}; {_FIXES[kind].format(setting=setting)}"
        )
