"""Which lengths share a shape? Edges fitted on the histogram of lengths."""

from dflash_core.bucketing.fit import fit_buckets
from dflash_core.bucketing.histogram import Histogram, histogram_of

__all__ = ["Histogram", "fit_buckets", "histogram_of"]
