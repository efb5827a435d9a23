"""Settings that every test runs under; they must be set before Prefect is imported."""

import os
from collections.abc import Iterator

os.environ.update(
    HF_HUB_OFFLINE="1",
    PREFECT_SERVER_ANALYTICS_ENABLED="false",
    DO_NOT_TRACK="1",
    MLFLOW_DISABLE_TELEMETRY="true",
    PREFECT_LOGGING_LEVEL="CRITICAL",
    PREFECT_LOGGING_TO_API_ENABLED="false",
    OMP_NUM_THREADS="1",
)

import pytest
from hypothesis import settings

# A machine that stops for a moment makes no example wrong.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """One real Prefect server with a database of its own for all flow tests."""
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
    from prefect.testing.utilities import prefect_test_harness

    with (
        prefect_test_harness(server_startup_timeout=600),
        temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}),
    ):
        yield
