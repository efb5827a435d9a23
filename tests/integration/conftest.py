"""A Prefect server with deployments and a worker, and the tiny run of the flow tests."""

from collections.abc import Iterator

import pytest

from tests.flows.conftest import runs, tiny_parts, tiny_settings  # noqa: F401
from tests.integration.places import Place, open_place


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A server on SQLite with the deployments of prefect.yaml and one worker."""
    with open_place(tmp_path_factory.mktemp("place")) as opened:
        opened.start_server()
        opened.set_up()
        opened.start_worker()
        yield opened
