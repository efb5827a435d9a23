"""A place among the GPUs: deployments that share machines take turns for torchrun alone."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.sync import concurrency

from dflash_core.errors import ConfigError
from tasks.console import announce

__all__ = ["gpu_slot"]


@contextmanager
def gpu_slot(limit: str | None) -> Iterator[None]:
    """Hold one slot of a global concurrency limit while the block runs.

    A limit that does not exist is an error, because it would silently limit nothing. An API that
    goes away while training runs does not end it.

    Args:
        limit: Name of the limit; None takes no turns.

    Raises:
        ConfigError: The server knows no such limit.
    """
    if limit is None:
        yield
        return
    announce(f"waiting for a slot of {limit}")
    with ExitStack() as held:
        try:
            held.enter_context(
                concurrency(limit, strict=True, raise_on_lease_renewal_failure=False)
            )
        except ConcurrencySlotAcquisitionError:
            raise ConfigError(
                f"the Prefect server has no concurrency limit '{limit}' (run.concurrency_limit); "
                f"create it with: prefect gcl create {limit} --limit 1"
            ) from None
        yield
