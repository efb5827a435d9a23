"""Queues of device work, one for each stage, so that a stage waits only for what it needs.

On a GPU every thread launches into the device's one default stream unless told otherwise, and a
communication operation of NCCL holds up the stream that was current when it was called. With one
stream, receiving the next step's features would get in front of this step's reduction: the
reduction waits for features, whose sender waits for a consumer that waits for the reduction. Each
stage therefore has a stream of its own, and hands over by an event
(https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams). A CPU has no such queues:
there, work is done when its call returns, and every method here does nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["Lane", "wait_for_device"]


class Lane:
    """The queue of one stage, behind what its maker has launched so far.

    Args:
        device: Where the stage's work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Launch this thread's work here."""
        if self._stream is None:
            yield
            return
        # Makes the stream's device the current one, too.
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Any:
        """Return what is done when everything launched here so far is done."""
        return None if self._stream is None else self._stream.record_event()

    def take_over(self, mark: Any, item: Any) -> None:
        """Let this thread's later work wait for a mark, and keep an item's memory until then.

        Args:
            mark: What `mark` returned when the item was made.
            item: What was made; the tensors among its attributes are used from now on.
        """
        if mark is None:
            return
        current = torch.cuda.current_stream(self._device)
        current.wait_event(mark)
        for value in vars(item).values() if hasattr(item, "__dict__") else ():
            if isinstance(value, Tensor) and value.is_cuda:
                value.record_stream(current)


def wait_for_device(device: torch.device) -> None:
    """Wait for what this thread has launched, not for what other stages run on the device."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
