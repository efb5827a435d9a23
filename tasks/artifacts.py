"""What the flow run's page in Prefect shows: progress, the strategies, the verdict, the lengths."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.context import FlowRunContext

from dflash_core.reporting import RunSummary, headline, length_bars, markdown, strategy_table
from tasks.console import OnProgress, warn

__all__ = ["progress_artifact", "publish"]

EVERY_S = 10.0
# An API that is away costs the picture, never the training that is pictured.
OUTAGES = (httpx.HTTPError, RuntimeError)


def publish(summary: RunSummary, page: Path) -> None:
    """Show the outcome of a flow run; does nothing outside one."""
    if FlowRunContext.get() is None:
        return
    table = strategy_table(summary)
    rows: list[dict[str, Any]] = [dict(zip(table.headings, r, strict=True)) for r in table.rows]
    lines = [f"- **{name}**: {value}" for name, value in headline(summary)]
    verdicts = [f"- {verdict.reason}" for verdict in summary.gate.verdicts]
    create_table_artifact(key="strategies", table=rows, description=summary.gate.reason)
    create_markdown_artifact(
        key="run-summary", markdown="\n".join([*lines, "", markdown(table), "", *verdicts])
    )
    create_markdown_artifact(key="lengths", markdown=f"```\n{length_bars(summary.profile)}\n```")
    create_link_artifact(key="report", link=page.as_uri(), link_text="report page")


@contextmanager
def progress_artifact(key: str, description: str) -> Iterator[OnProgress]:
    """Give a callback that moves a bar on the flow run's page; does nothing outside a flow run."""
    if FlowRunContext.get() is None:
        yield lambda done, total: None
        return
    artifact = create_progress_artifact(0.0, key=key, description=description)
    assert isinstance(artifact, UUID)  # a coroutine in asynchronous callers only
    next_at = time.monotonic() + EVERY_S

    def on_progress(done: int, total: int) -> None:
        nonlocal next_at
        if time.monotonic() >= next_at:
            _move(artifact, 100 * done / total)
            next_at = time.monotonic() + EVERY_S

    yield on_progress
    _move(artifact, 100.0)


def _move(artifact: UUID, percent: float) -> None:
    try:
        update_progress_artifact(artifact, percent)
    except OUTAGES as error:
        warn(f"the progress bar does not reach Prefect: {error}")
