"""A stage of the pipeline: an iterator that runs ahead in a thread of its own, by so much."""

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from dflash_core.errors import TrainingError
from dflash_core.training.ranks.lane import Lane

__all__ = ["Stage"]

T = TypeVar("T")
POLL_S = 0.05
_END = object()


class _Raised:
    def __init__(self, error: BaseException) -> None:
        self.error = error


class Stage(Generic[T]):
    """Iterates in the background and hands results over a bounded queue.

    Args:
        items: What to run ahead; its errors come out here.
        depth: Results that may wait; the stage pauses when so many do.
        name: Name for error messages.
        lane: Where the iterator launches work on a device.
        timeout_s: Longest wait for a result.

    Attributes:
        busy_s: Seconds spent in the iterator.
    """

    def __init__(
        self,
        items: Iterator[T],
        *,
        depth: int,
        name: str,
        lane: Lane,
        timeout_s: float,
    ) -> None:
        self.busy_s = 0.0
        self._items = items
        self._name = name
        self._lane = lane
        self._timeout_s = timeout_s
        self._queue: queue.Queue[tuple[object, Any]] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Results that wait to be taken."""
        return self._queue.qsize()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        try:
            found, mark = self._queue.get(timeout=self._timeout_s)
        except queue.Empty:
            raise TrainingError(
                f"the {self._name} stage gave nothing for {self._timeout_s:g} s; look at the "
                "storage of the token store, or raise training.timeout_s"
            ) from None
        if isinstance(found, _Raised):
            self._queue.put((found, None))
            raise found.error
        if found is _END:
            self._queue.put((_END, None))
            raise StopIteration
        self._lane.take_over(mark, found)
        return found  # type: ignore[return-value]

    def close(self, *, wait_s: float | None = None) -> None:
        """Stop running ahead and drop what waits.

        Args:
            wait_s: Longest wait for what is under way, which stuck storage may never end; as long
                as for a result when not given.
        """
        self._closed.set()
        deadline = time.monotonic() + (self._timeout_s if wait_s is None else wait_s)
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._drop()
            self._thread.join(POLL_S)
        self._drop()

    def _drop(self) -> None:
        try:
            while True:
                self._queue.get_nowait()
        except queue.Empty:
            return

    def _run(self) -> None:
        last: object = _END
        try:
            with self._lane.in_use():
                while not self._closed.is_set():
                    begin = time.perf_counter()
                    item = next(self._items, _END)
                    self.busy_s += time.perf_counter() - begin
                    if item is _END:
                        break
                    self._hand_over(item, self._lane.mark())
        except BaseException as error:
            last = _Raised(error)
        self._hand_over(last)

    def _hand_over(self, item: object, mark: Any = None) -> None:
        while not self._closed.is_set():
            try:
                self._queue.put((item, mark), timeout=POLL_S)
            except queue.Full:
                continue
            return
