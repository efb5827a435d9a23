"""Which lengths share a shape? Edges fitted on the histogram of lengths."""

from dflash_core.bucketing.baselines import edge_efficiency, quantile_edges, token_mass_edges
from dflash_core.bucketing.config import BucketingConfig, ShapeCost
from dflash_core.bucketing.fit import BucketFit, fit_bucket_edges, fit_buckets
from dflash_core.bucketing.histogram import Histogram, histogram_of

__all__ = [
    "BucketFit",
    "BucketingConfig",
    "Histogram",
    "ShapeCost",
    "edge_efficiency",
    "fit_bucket_edges",
    "fit_buckets",
    "histogram_of",
    "quantile_edges",
    "token_mass_edges",
]
