"""How long are the samples, and which lengths share a bucket?"""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from configs.settings import Settings
from dflash_core.artifacts import atomic_write
from dflash_core.bucketing import edge_efficiency
from dflash_core.corpus.store import TokenStore
from dflash_core.planning.strategies.bucketed import bucket_edges
from dflash_core.profiling import LengthProfile, profile_data
from dflash_core.profiling.reader import token_files
from dflash_core.reporting import ProfileFacts
from tasks.console import announce
from tasks.places.keys import cached_path
from tasks.places.run_folder import RunFolder
from tasks.sharded import profile_with_dask

__all__ = ["fit_edges", "profile_facts", "profile_lengths"]

QUANTILES = {"P50": 0.5, "P90": 0.9, "P99": 0.99, "max": 1.0}


@task(name="profile-lengths", cache_policy=NO_CACHE)
def profile_lengths(store: Path, folder: RunFolder, *, dask: str | None = None) -> LengthProfile:
    """Profile a store, here or on a Dask cluster, or read the profile made of the same one."""
    file = cached_path(folder, "profile", TokenStore.open(store).content_hash)
    if file.is_file():
        profile = LengthProfile.from_json(file.read_bytes())
    else:
        files = token_files([store])
        profile = profile_with_dask(files, dask) if dask else profile_data(files)
        atomic_write(file, profile.to_json())
    quantiles = ", ".join(f"{name} {profile.quantile(q):,}" for name, q in QUANTILES.items())
    announce(f"lengths: {profile.total_tokens:,} tokens, {quantiles}")
    return profile


@task(name="fit-buckets", cache_policy=NO_CACHE)
def fit_edges(settings: Settings, profile: LengthProfile) -> tuple[int, ...]:
    """Return the bucket edges of the bucketed strategy: the given ones, or fitted ones."""
    edges = tuple(bucket_edges(profile, settings.batching).tolist())
    if settings.batching.edges is not None:
        announce(f"buckets: {len(edges)} edges as given")
    else:
        real = edge_efficiency(profile, edges)
        announce(f"buckets: {len(edges)} edges, {real:.3f} of slots real when padded to the edge")
    return edges


def profile_facts(profile: LengthProfile, edges: tuple[int, ...]) -> ProfileFacts:
    """Return the figures that the report page shows."""
    spike = profile.truncation_spike
    return ProfileFacts(
        num_samples=profile.num_samples,
        total_tokens=profile.total_tokens,
        total_supervised=profile.total_supervised or 0,
        quantiles={name: profile.quantile(q) for name, q in QUANTILES.items()},
        spike="" if spike is None else f"{spike.share:.1%} of samples at {spike.length:,} tokens",
        lengths=tuple(profile.lengths.tolist()),
        counts=tuple(profile.counts.tolist()),
        edges=edges,
    )
