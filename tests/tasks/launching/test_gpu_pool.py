"""Taking turns on a real Prefect server: who waits is told for whom, and not for ever."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate

from configs.settings import RunConfig
from dflash_core.errors import ConfigError, TimeLimitError, TrainingError
from tasks.launching.gpu_pool import gpu_slot, held_by

pytestmark = pytest.mark.usefixtures("prefect_server")


def test_waiting_for_a_slot_ends_with_the_name_of_who_holds_it() -> None:
    with get_client(sync_client=True) as client:
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name="one", limit=1))

    @flow(flow_run_name="the-first")
    def take_two() -> None:
        assert held_by("one") == ""
        with gpu_slot(RunConfig(concurrency_limit="one")):
            wait_for_the_event("one")
            with gpu_slot(RunConfig(concurrency_limit="one", slot_wait_s=0.2)):
                pass

    sentence = r"within 0.2 s \(run.slot_wait_s\), held by the-first \(Running\); wait longer"
    with pytest.raises(TimeLimitError, match=sentence):
        take_two()
    assert held_by("one") == ""


def test_a_limit_that_does_not_exist_is_an_error_that_says_how_to_make_it() -> None:
    @flow
    def take() -> None:
        with gpu_slot(RunConfig(concurrency_limit="none-such")):
            pass

    with pytest.raises(ConfigError, match="create it with: prefect gcl create none-such --limit 1"):
        take()


def test_a_server_that_goes_away_does_not_cover_why_a_run_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @contextmanager
    def concurrency(*_: object, **__: object) -> Iterator[None]:
        try:
            yield
        finally:
            raise httpx.ConnectError("nobody there")

    monkeypatch.setattr("tasks.launching.gpu_pool.concurrency", concurrency)
    with (
        pytest.raises(TrainingError, match="a rank failed"),
        gpu_slot(RunConfig(concurrency_limit="one")),
    ):
        raise TrainingError("a rank failed")
    assert "lapses by itself" in caplog.text


def wait_for_the_event(limit: str) -> None:
    """Events are sent by a thread of Prefect's and stored in batches."""
    deadline = time.monotonic() + 200
    while "the-first" not in held_by(limit):
        assert time.monotonic() < deadline, "the server never said who holds the slot"
        time.sleep(0.2)
