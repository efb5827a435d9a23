"""The argument vector of torchrun: nothing that a setting says becomes an option of it."""

import pytest
from pydantic import ValidationError

from configs.settings import RunConfig
from tasks.launching.launch import Launch


def test_one_machine_stands_alone_and_several_meet() -> None:
    alone = Launch(module="m", arguments=("--config", "job.json"), num_ranks=4)
    assert {"--standalone", "--nproc-per-node=4"} <= set(alone.command)
    assert alone.command[-4:] == ["-m", "m", "--config", "job.json"]
    meeting = {"nodes": 2, "rendezvous": "gpu-0.dflash:29400", "key": "run-0"}
    shared = alone.model_copy(update=meeting).command
    assert "--standalone" not in shared
    assert {"--nnodes=2", "--nproc-per-node=2", "--rdzv-endpoint=gpu-0.dflash:29400"} <= set(shared)


@pytest.mark.parametrize("where", ["--nproc-per-node=9:1", "host", "host:1 --x", "host:1\n", ":1"])
def test_a_place_to_meet_is_a_host_and_a_port(where: str) -> None:
    with pytest.raises(ValidationError, match="rendezvous"):
        RunConfig(nodes=2, rendezvous=where)


@pytest.mark.parametrize("address", ["local", "tcp://10.0.0.1:8786", "tls://[::1]:8786"])
def test_dask_is_local_or_an_address(address: str) -> None:
    assert RunConfig(dask=address).dask == address
    with pytest.raises(ValidationError, match="dask"):
        RunConfig(dask="tcp://me:password@host:1")
