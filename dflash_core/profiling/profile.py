"""The length profile: an exact histogram, small however many samples it describes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, field_validator, model_validator

from dflash_core.config import FrozenModel
from dflash_core.errors import DataError
from dflash_core.profiling.screening import BAD_KINDS, Oversize, screen_lengths
from dflash_core.profiling.spike import TruncationSpike, find_spike

__all__ = ["DomainHistogram", "LengthProfile"]


class DomainHistogram(FrozenModel):
    """Lengths of one domain: ``counts[i]`` samples have ``lengths[i]`` tokens."""

    lengths: tuple[int, ...] = ()
    """Distinct lengths in tokens, increasing."""
    counts: tuple[int, ...] = ()
    """Samples of each length."""
    supervised: int = 0
    """Supervised tokens of all samples."""

    @model_validator(mode="after")
    def _check(self) -> "DomainHistogram":
        if len(self.lengths) != len(self.counts):
            raise ValueError(f"{len(self.lengths)} lengths but {len(self.counts)} counts")
        if any(a >= b for a, b in zip(self.lengths, self.lengths[1:], strict=False)):
            raise ValueError("lengths are not increasing")
        if self.counts and (min(self.counts) < 1 or self.lengths[0] < 1):
            raise ValueError("lengths and counts must be positive")
        return self


class LengthProfile(FrozenModel):
    """How long the samples are, per domain; two profiles merge exactly.

    Example:
        >>> profile = LengthProfile.from_lengths([5, 5, 9])
        >>> profile.merge(profile).counts
        array([4, 2])
    """

    domains: dict[str, DomainHistogram] = Field(default_factory=dict)
    """Histogram of each domain; samples without a domain are under ''."""
    bad: dict[str, int] = Field(default_factory=lambda: dict.fromkeys(BAD_KINDS, 0))
    """Samples with a null, zero, negative, absurd or over-long length."""
    num_dropped: int = 0
    """Samples that the policy left out."""
    num_truncated: int = 0
    """Samples that the policy shortened."""
    max_length: int | None = None
    """The maximum that the policy applied; none when not given."""

    @field_validator("bad")
    @classmethod
    def _check_kinds(cls, bad: dict[str, int]) -> dict[str, int]:
        if bad.keys() != set(BAD_KINDS):
            raise ValueError(f"bad lengths are of kinds {list(bad)}, not {list(BAD_KINDS)}")
        return bad

    @field_validator("domains")
    @classmethod
    def _sort_domains(cls, domains: dict[str, DomainHistogram]) -> dict[str, DomainHistogram]:
        return dict(sorted(domains.items()))

    @classmethod
    def from_lengths(
        cls,
        lengths: ArrayLike,
        supervised: ArrayLike | None = None,
        domains: Sequence[str] | None = None,
        *,
        max_length: int | None = None,
        oversize: Oversize = "error",
    ) -> "LengthProfile":
        """Profile lengths in memory.

        Args:
            lengths: Sequence lengths in tokens, shape ``(num_samples,)``.
            supervised: Supervised tokens of each sample, same shape.
            domains: Domain of each sample, same length.
            max_length: Longest usable sample.
            oversize: What happens to longer samples and to unusable lengths.

        Raises:
            DataError: Shapes differ, or a bad length under ``error``.
        """
        screened = screen_lengths(lengths, max_length=max_length, oversize=oversize)
        num_samples = screened.lengths.size + screened.num_dropped
        for name, values in (("supervised", supervised), ("domains", domains)):
            if values is not None and len(np.asarray(values)) != num_samples:
                raise DataError(
                    f"{name} has {len(np.asarray(values)):,} entries for {num_samples:,} lengths"
                )
        tokens = (
            np.minimum(screened.select(supervised), screened.lengths)
            if supervised is not None
            else None
        )
        names, group = (
            ([""], None) if domains is None else _group(np.asarray(domains)[_kept(screened)])
        )
        histograms = {
            str(name): _histogram(
                screened.lengths if group is None else screened.lengths[group == number],
                tokens if tokens is None or group is None else tokens[group == number],
            )
            for number, name in enumerate(names)
        }
        return cls(
            domains={name: part for name, part in histograms.items() if part.counts},
            bad=screened.bad,
            num_dropped=screened.num_dropped,
            num_truncated=screened.num_truncated,
            max_length=max_length,
        )

    def merge(self, other: "LengthProfile") -> "LengthProfile":
        """Return the profile of both sets of samples together.

        Raises:
            DataError: The two were screened with different maxima.
        """
        if self.max_length != other.max_length:
            raise DataError(
                f"profiles with max_length {self.max_length} and {other.max_length} do not merge; "
                "profile both with the same max_length"
            )
        both = self.domains.keys() & other.domains.keys()
        merged = {name: _merge(self.domains[name], other.domains[name]) for name in both}
        return LengthProfile(
            domains={**self.domains, **other.domains, **merged},
            bad={kind: self.bad[kind] + other.bad[kind] for kind in BAD_KINDS},
            num_dropped=self.num_dropped + other.num_dropped,
            num_truncated=self.num_truncated + other.num_truncated,
            max_length=self.max_length,
        )

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Distinct lengths in tokens, increasing, shape ``(num_distinct,)``."""
        return self._combined()[0]

    @property
    def counts(self) -> NDArray[np.int64]:
        """Samples of each distinct length, shape ``(num_distinct,)``."""
        return self._combined()[1]

    @property
    def num_samples(self) -> int:
        """Usable samples."""
        return sum(sum(part.counts) for part in self.domains.values())

    @property
    def total_tokens(self) -> int:
        """Real tokens of all usable samples."""
        return sum(
            length * count
            for part in self.domains.values()
            for length, count in zip(part.lengths, part.counts, strict=True)
        )

    @property
    def total_supervised(self) -> int:
        """Supervised tokens of all usable samples."""
        return sum(part.supervised for part in self.domains.values())

    @property
    def truncation_spike(self) -> TruncationSpike | None:
        """The pile of samples at exactly the maximum, when it is no part of the tail."""
        spike = find_spike(*self._combined())
        return None if spike is None or spike.count < 2 else spike

    def quantile(self, q: float) -> int:
        """Return the smallest length that at least a share ``q`` of the samples does not exceed.

        Raises:
            DataError: ``q`` is outside [0, 1] or the profile is empty.
        """
        lengths, counts = self._combined()
        if not 0 <= q <= 1:
            raise DataError(f"quantile {q} is outside 0 to 1")
        if not lengths.size:
            raise DataError("an empty profile has no quantiles; give at least one usable sample")
        reached = np.cumsum(counts) >= q * int(counts.sum())
        return int(lengths[int(np.argmax(reached))])

    def to_json(self) -> str:
        """Return the profile as JSON; `model_validate_json` reads it back."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str | bytes) -> "LengthProfile":
        """Read what `to_json` wrote."""
        return cls.model_validate_json(text)

    def of_domain(self, name: str) -> "LengthProfile":
        """Return the profile of one domain, without the counts of bad lengths."""
        return LengthProfile(domains={name: self.domains[name]}, max_length=self.max_length)

    def summary(self) -> dict[str, Any]:
        """Return the figures that people and programs ask for first, JSON-able."""
        spike = self.truncation_spike
        return {
            **self._figures(),
            "truncation_spike": None if spike is None else spike.model_dump(),
            "bad": dict(self.bad),
            "num_dropped": self.num_dropped,
            "num_truncated": self.num_truncated,
            "domains": {name: self.of_domain(name)._figures() for name in self.domains},
        }

    def _figures(self) -> dict[str, Any]:
        empty = not self.num_samples
        quantiles = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
        return {
            "num_samples": self.num_samples,
            "total_tokens": self.total_tokens,
            "total_supervised": self.total_supervised,
            "mean": None if empty else self.total_tokens / self.num_samples,
            **{name: None if empty else self.quantile(q) for name, q in quantiles.items()},
        }

    def _combined(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        parts = list(self.domains.values())
        return _sum_counts(
            np.array([length for part in parts for length in part.lengths], dtype=np.int64),
            np.array([count for part in parts for count in part.counts], dtype=np.int64),
        )


def _sum_counts(
    lengths: NDArray[np.int64], counts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    distinct, inverse = np.unique(lengths, return_inverse=True)
    sums = np.zeros(distinct.size, dtype=np.int64)
    np.add.at(sums, inverse, counts)
    return distinct, sums


def _kept(screened: Any) -> Any:
    return slice(None) if screened.kept is None else screened.kept


def _group(domains: NDArray[Any]) -> tuple[list[str], NDArray[np.intp]]:
    names, group = np.unique(domains, return_inverse=True)
    return [str(name) for name in names], group


def _histogram(lengths: NDArray[np.int32], supervised: NDArray[np.int64] | None) -> DomainHistogram:
    distinct, counts = np.unique(lengths, return_counts=True)
    return DomainHistogram(
        lengths=tuple(distinct.tolist()),
        counts=tuple(counts.tolist()),
        supervised=0 if supervised is None else int(supervised.sum()),
    )


def _merge(first: DomainHistogram, second: DomainHistogram) -> DomainHistogram:
    lengths, counts = _sum_counts(
        np.array([*first.lengths, *second.lengths], dtype=np.int64),
        np.array([*first.counts, *second.counts], dtype=np.int64),
    )
    return DomainHistogram(
        lengths=tuple(lengths.tolist()),
        counts=tuple(counts.tolist()),
        supervised=first.supervised + second.supervised,
    )
