"""The length picture where only text is shown: Prefect's artifacts and the terminal."""

import numpy as np

from dflash_core.reporting.summary import ProfileFacts

__all__ = ["length_bars"]

NUM_ROWS = 16
WIDTH = 50


def length_bars(profile: ProfileFacts) -> str:
    """Return the length histogram as rows of text, one for each class of lengths.

    Example:
        >>> profile = ProfileFacts(
        ...     num_samples=3, total_tokens=13, total_supervised=0, quantiles={},
        ...     lengths=(4, 5), counts=(2, 1), edges=(5,),
        ... )
        >>> print(length_bars(profile))
            1..4 ██████████████████████████████████████████████████ 2
            5..5 █████████████████████████ 1
        bucket edges: 5
    """
    longest = profile.lengths[-1]
    edges = np.unique(np.linspace(0, longest, NUM_ROWS + 1).astype(int))
    if longest <= NUM_ROWS:
        edges = np.array([0, *profile.lengths])
    lengths, counts = np.array(profile.lengths), np.array(profile.counts)
    classes = np.searchsorted(edges, lengths) - 1
    sums = np.bincount(classes, weights=counts, minlength=edges.size - 1).astype(int)
    digits = len(f"{longest:,}")
    rows = [
        f"{f'{low + 1:,}..{high:,}':>{2 * digits + 6}} {'█' * _width(count, sums)} {count:,}"
        for low, high, count in zip(edges[:-1], edges[1:], sums, strict=True)
    ]
    rows.append(f"bucket edges: {', '.join(f'{edge:,}' for edge in profile.edges) or 'none'}")
    return "\n".join(rows)


def _width(count: int, sums: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> int:
    return -(-WIDTH * count // int(sums.max()))
