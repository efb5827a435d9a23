"""A place among the GPUs: deployments that share machines take turns for what needs one."""

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from uuid import UUID

import httpx
import torch
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.concurrency.asyncio import (
    AcquireConcurrencySlotTimeoutError,
    ConcurrencySlotAcquisitionError,
)
from prefect.concurrency.sync import concurrency
from prefect.events.filters import EventFilter, EventNameFilter, EventResourceFilter
from prefect.exceptions import ObjectNotFound

from configs.settings import RunConfig, Settings
from dflash_core.errors import ConfigError, TimeLimitError
from dflash_core.training.ranks.groups import device_of
from tasks.console import announce, warn

__all__ = ["decoding_device", "gpu_slot", "held_by"]

ACQUIRED, RELEASED = (f"prefect.concurrency-limit.{word}" for word in ("acquired", "released"))

NEWEST = 50  # events; a Prefect server gives no more at once


@contextmanager
def decoding_device(settings: Settings) -> Iterator[torch.device]:
    """Hold a slot and yield where to decode: the run's device, whose memory ranks need afterwards.

    Args:
        settings: The run's.

    Raises:
        ConfigError: As `gpu_slot`.
        TimeLimitError: As `gpu_slot`.
    """
    device = device_of(settings.training)
    with gpu_slot(settings.run):
        try:
            yield device
        finally:
            if device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()


@contextmanager
def gpu_slot(config: RunConfig) -> Iterator[None]:
    """Hold one slot of a global concurrency limit while the block runs.

    A limit that does not exist is an error, because it would silently limit nothing. An API that
    goes away while training runs does not end it.

    Args:
        config: Names the limit, or none to take no turns, and says how long to wait.

    Raises:
        ConfigError: The server knows no such limit, or cannot be asked for it.
        TimeLimitError: No slot became free in time.
    """
    limit = config.concurrency_limit
    if limit is None:
        yield
        return
    announce(f"waiting for a slot of {limit}{held_by(limit)}")
    with ExitStack() as held:
        try:
            held.enter_context(
                concurrency(
                    limit,
                    strict=True,
                    timeout_seconds=config.slot_wait_s,
                    raise_on_lease_renewal_failure=False,
                )
            )
        except AcquireConcurrencySlotTimeoutError:
            raise TimeLimitError(
                f"no slot of {limit} became free within {config.slot_wait_s:g} s "
                f"(run.slot_wait_s){held_by(limit)}; wait longer, give it more slots, or, if "
                f"those runs have ended, free it: prefect gcl update {limit} --active-slots 0"
            ) from None
        except ConcurrencySlotAcquisitionError as error:
            if error.__cause__ is not None:
                raise ConfigError(
                    f"the Prefect server gives no slot of '{limit}' (run.concurrency_limit): "
                    f"{error.__cause__}"
                ) from error
            raise ConfigError(
                f"the Prefect server has no concurrency limit '{limit}' (run.concurrency_limit); "
                f"create it with: prefect gcl create {limit} --limit 1"
            ) from None
        try:
            yield
        finally:  # whatever the block raises is what is told
            try:
                held.close()
            except httpx.HTTPError as error:
                warn(f"the slot of {limit} lapses by itself, for no answer came: {error}")


def held_by(limit: str) -> str:
    """Say which flow runs hold the slots and how those are, when all slots are taken.

    The server's events tell who took a slot. A run that has ended can still hold one: until its
    lease lapses, or for ever where the server kept leases in memory and was restarted.
    """
    try:
        with get_client(sync_client=True) as client:
            found = client.read_global_concurrency_limit_by_name(limit)
            if found.active_slots < found.limit:
                return ""
            runs = _holders(client, found.id)[: found.limit]
            told = [_told(client, run) for run in runs]
    except (httpx.HTTPError, ObjectNotFound):  # who asks for the slot next says what is wrong
        return ""
    return f", held by {', '.join(told) or 'no run that the events of the server tell of'}"


def _holders(client: SyncPrefectClient, limit_id: UUID) -> list[UUID]:
    """Return the flow runs that took a slot and did not give it back, newest first."""
    resource = EventResourceFilter(id=[f"prefect.concurrency-limit.{limit_id}"])
    names = EventNameFilter(name=[ACQUIRED, RELEASED])
    events = client.read_events(EventFilter(event=names, resource=resource), limit=NEWEST).events
    over = {event.follows for event in events if event.event == RELEASED}
    return [
        UUID(event.resource_in_role["flow-run"].id.removeprefix("prefect.flow-run."))
        for event in events
        if event.event == ACQUIRED and event.id not in over and "flow-run" in event.resource_in_role
    ]


def _told(client: SyncPrefectClient, run_id: UUID) -> str:
    try:
        run = client.read_flow_run(run_id)
    except ObjectNotFound:
        return f"{run_id} (deleted)"
    return f"{run.name} ({run.state_name or 'no state'})"
