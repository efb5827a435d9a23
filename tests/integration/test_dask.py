"""Profiling shared out over the processes of a Dask cluster."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from prefect import flow
from prefect.settings import PREFECT_API_URL, temporary_settings

from dflash_core.errors import ConfigError, DataError
from dflash_core.profiling import LengthProfile, profile_data
from tasks.sharded import profile_with_dask
from tests.integration.places import Place

pytestmark = pytest.mark.integration


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Eight shards of unequal sizes with lengths of a heavy tail, two domains and a few nulls."""
    draw = np.random.default_rng(7)
    files = []
    for number in range(8):
        lengths = np.minimum(draw.lognormal(6, 1, 1_000 * (number + 1)).astype(int) + 1, 8_192)
        frame = pl.DataFrame(
            {
                "length": lengths,
                "supervised": draw.integers(0, lengths + 1),
                "domain": draw.choice(["code", "chat"], lengths.size),
            }
        ).with_columns(
            length=pl.when(pl.int_range(pl.len()) % 997 == 5).then(None).otherwise("length")
        )
        files.append(tmp_path / f"part-{number}.parquet")
        frame.write_parquet(files[-1])
    return files


def profile(place: Place, shards: list[Path], address: str) -> LengthProfile:
    pytest.importorskip("prefect_dask", reason="pip install 'dflash-flows[dask]'")

    @flow
    def profile_shards(files: list[Path]) -> LengthProfile:
        return profile_with_dask(files, address)

    with temporary_settings({PREFECT_API_URL: place.api_url}):
        return profile_shards(shards)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:distributed")
def test_eight_shards_give_the_profile_of_one_process(shards: list[Path], place: Place) -> None:
    shared = profile(place, shards, "local")
    whole = profile_data(shards)
    assert shared == whole
    assert shared.to_json() == whole.to_json()
    assert whole.num_samples + whole.num_dropped == 36_000 and whole.bad["null"] > 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning:distributed")
def test_a_file_that_a_worker_cannot_read_is_told(tmp_path: Path, place: Place) -> None:
    file = tmp_path / "shard-00000.arrow"
    file.symlink_to("/proc/self/mem")  # opens, and fails to be read with an OS error
    with pytest.raises(DataError, match="cannot be read by a Dask worker"):
        profile(place, [file], "local")


def test_a_scheduler_that_is_not_there_is_one_sentence(shards: list[Path], place: Place) -> None:
    config = pytest.importorskip("dask.config", reason="pip install 'dflash-flows[dask]'")
    with (
        config.set({"distributed.comm.timeouts.connect": "1s"}),
        pytest.raises(ConfigError, match=r"run.dask names tcp://127.0.0.1:9, where no Dask sch"),
    ):
        profile(place, shards, "tcp://127.0.0.1:9")
