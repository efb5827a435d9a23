"""A profile from counted lengths, under the policy that `screen_lengths` applies to samples."""

from collections.abc import Sequence

from dflash_core.errors import DataError
from dflash_core.profiling.profile import DomainHistogram, LengthProfile
from dflash_core.profiling.screening import ABSURD_LENGTH, BAD_KINDS, Oversize

__all__ = ["profile_of_counts"]


def profile_of_counts(
    lengths: Sequence[int | None],
    counts: Sequence[int],
    supervised: Sequence[int],
    *,
    domain: str = "",
    max_length: int | None = None,
    oversize: Oversize = "error",
) -> LengthProfile:
    """Profile one domain from a table of lengths.

    Args:
        lengths: Distinct lengths in tokens in any order; None for samples without one.
        counts: Samples of each length.
        supervised: Supervised tokens of all samples of each length.
        domain: Where the samples came from.
        max_length: Longest usable sample.
        oversize: What happens to longer samples and to unusable lengths.

    Raises:
        DataError: There is a bad length and the policy is ``error``.
    """
    bad = dict.fromkeys(BAD_KINDS, 0)
    usable: dict[int, int] = {}
    total_supervised = 0
    for length, count, own in zip(lengths, counts, supervised, strict=True):
        kind = _kind(length, max_length)
        if kind is not None:
            bad[kind] += count
            if oversize == "error":
                raise DataError(_refusal(kind, length, count, domain, max_length))
        if length is None or (kind is not None and (kind, oversize) != ("oversize", "truncate")):
            continue
        kept = length if max_length is None else min(length, max_length)
        usable[kept] = usable.get(kept, 0) + count
        total_supervised += own
    truncated = bad["oversize"] if oversize == "truncate" else 0
    table = sorted(usable.items())
    histogram = DomainHistogram(
        lengths=tuple(length for length, _ in table),
        counts=tuple(count for _, count in table),
        supervised=total_supervised,
    )
    return LengthProfile(
        domains={domain: histogram} if table else {},
        bad=bad,
        num_dropped=sum(bad.values()) - truncated,
        num_truncated=truncated,
        max_length=max_length,
    )


def _kind(length: int | None, max_length: int | None) -> str | None:
    if length is None:
        return "null"
    if length <= 0:
        return "negative" if length else "zero"
    if length >= ABSURD_LENGTH:
        return "absurd"
    return "oversize" if max_length is not None and length > max_length else None


def _refusal(
    kind: str, length: int | None, count: int, domain: str, max_length: int | None
) -> str:
    what = "no length" if length is None else f"{length:,} tokens"
    where = f" of domain '{domain}'" if domain else ""
    if kind == "oversize":
        return (
            f"{count:,} samples{where} have {what} but max_length is {max_length:,}; "
            "raise it or set oversize to 'truncate' or 'drop'"
        )
    return (
        f"{count:,} samples{where} have {what} but a usable length is 1 to {ABSURD_LENGTH - 1:,}; "
        "set oversize to 'drop' to leave such samples out"
    )
