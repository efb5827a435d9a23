"""Profiles of shards, made by the workers of a Dask cluster and merged exactly."""

from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from dflash_core.errors import ConfigError, DataError
from dflash_core.profiling import LengthProfile, profile_data

__all__ = ["profile_with_dask"]

LOCAL = "local"


@task(name="profile-shard", cache_policy=NO_CACHE)
def profile_shard(file: Path) -> LengthProfile:
    """Profile one file; runs on a Dask worker, which sees the same folders."""
    try:
        return profile_data([file])
    except OSError as error:
        raise DataError(
            f"{file} cannot be read by a Dask worker ({error}); give the workers of run.dask the "
            "same folders, and the rights to read them"
        ) from None


def profile_with_dask(files: Sequence[Path], address: str) -> LengthProfile:
    """Profile files on a Dask cluster; the same profile as in one process.

    Args:
        files: Token data, at the same place on every worker.
        address: Of the scheduler, or 'local' for a cluster of this machine's own.

    Raises:
        ConfigError: prefect-dask is not installed, or no scheduler answers.
        DataError: A worker cannot read a file, or as `profile_data`.
    """
    try:
        from prefect_dask.task_runners import DaskTaskRunner
    except ImportError:
        raise ConfigError(
            f"run.dask is '{address}' but prefect-dask is not installed; install it with: pip "
            "install 'dflash-flows[dask]'"
        ) from None
    # Dask's own page would listen on all addresses.
    runner = (
        DaskTaskRunner(cluster_kwargs={"dashboard_address": None})
        if address == LOCAL
        else DaskTaskRunner(address=address)
    )
    try:
        with runner:
            futures: list[Any] = list(runner.map(profile_shard, {"file": list(files)}))
            parts = [future.result() for future in futures]
    except OSError as error:  # also what Dask raises when it is cut off
        raise ConfigError(
            f"run.dask names {address}, where no Dask scheduler answers ({error}); start it, or "
            "leave run.dask out"
        ) from error
    return reduce(LengthProfile.merge, parts)
