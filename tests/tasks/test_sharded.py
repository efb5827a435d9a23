"""What a Dask worker says of a file; the cluster itself is in tests/integration."""

from pathlib import Path

import pytest

from dflash_core.errors import DataError
from tasks.sharded import profile_shard


def test_a_file_that_cannot_be_read_is_no_missing_scheduler(tmp_path: Path) -> None:
    file = tmp_path / "shard-00000.arrow"
    file.symlink_to("/proc/self/mem")  # opens, and fails to be read with an OS error
    with pytest.raises(DataError, match=r"cannot be read by a Dask worker .*give the workers"):
        profile_shard.fn(file)
