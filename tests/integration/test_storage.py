"""Chats in an S3 bucket, on a small S3 server of the test's own."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from dflash_core.reporting import RunSummary
from flows.plan_batches import plan_batches
from tests.flows.conftest import MakeSettings
from tests.integration.places import Place, answers, free_port, wait_for

pytestmark = pytest.mark.integration

PLANTED = "planted-secret-of-the-bucket"


@pytest.fixture
def chats(place: Place, tiny_parts: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The tiny run's chats as an object; the address is read where a worker would read it."""
    s3fs = pytest.importorskip("s3fs", reason="pip install 'dflash-flows[s3]'")
    pytest.importorskip("moto.server", reason="pip install 'moto[server]'")
    port = free_port()
    keys = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": PLANTED}
    address = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**keys, **address}.items():
        monkeypatch.setenv(name, value)
    place.start("s3", "moto.server", "-H", "127.0.0.1", "-p", str(port))
    wait_for(lambda: answers(f"http://127.0.0.1:{port}/"), what="the S3 server")
    bucket = s3fs.S3FileSystem(skip_instance_cache=True)
    bucket.mkdir("chats")
    bucket.put_file(str(tiny_parts / "chats.jsonl"), "chats/deep/chats.jsonl")
    yield Path("s3://chats/deep")
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.filterwarnings("ignore::DeprecationWarning:botocore")
def test_a_flow_reads_a_bucket_once_and_keeps_its_keys_to_itself(
    place: Place, chats: Path, tiny_settings: MakeSettings, tmp_path: Path
) -> None:
    def plan(source: Path, root: Path, limit: int | None = None) -> str:
        corpus = {"inputs": [source], "max_samples": limit}
        settings = tiny_settings(
            run={"root": root}, corpus=corpus, compare={"strategies": ["sorted"]}
        )
        with temporary_settings({PREFECT_API_URL: place.api_url}):
            planned = plan_batches(settings)
        assert isinstance(planned, RunSummary)
        return planned.strategies[0].plan_hash

    remote = plan(chats, tmp_path)
    (fetched,) = (tmp_path / "cache").glob("fetched-*")
    assert plan(chats, tmp_path) == remote == plan(fetched, tmp_path / "beside")
    assert list((tmp_path / "cache").glob("fetched-*")) == [fetched]
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == PLANTED
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) > 30
    assert [file for file in files if PLANTED.encode() in file.read_bytes()] == []
