"""How busy the machine is while a run trains: CPU, memory, disk, network and GPUs, to MLflow.

MLflow's own monitors measure; its own thread would bypass the spool, so this module brings one.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mlflow.system_metrics.metrics.base_metrics_monitor import BaseMetricsMonitor
from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

from tasks.console import warn
from tasks.tracking.run import TrackedRun

__all__ = ["system_metrics"]

EVERY_S = 10.0
PREFIX = "system/"  # where MLflow's page looks for them


@contextmanager
def system_metrics(run: TrackedRun, *, every_s: float = EVERY_S) -> Iterator[None]:
    """Sample the machine while the block runs, once at its start and then now and then.

    Args:
        run: Where samples go; their step is the second since the start.
        every_s: Time between samples.
    """
    monitors = _monitors()
    ended = threading.Event()
    started = time.monotonic()

    def sample() -> None:
        while True:
            try:
                run.log_metrics(_measured(monitors), step=round(time.monotonic() - started))
            except OSError as error:  # such as a full disk, which the run will tell too
                warn(f"no more system metrics are recorded: {error}")
                return
            if ended.wait(every_s):
                return

    thread = threading.Thread(target=sample, name="system-metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _measured(monitors: list[BaseMetricsMonitor]) -> dict[str, float]:
    values: dict[str, float] = {}
    for monitor in monitors:
        monitor.collect_metrics()
        values.update(monitor.aggregate_metrics() or {})
        monitor.clear_metrics()
    return {f"{PREFIX}{name}": value for name, value in values.items()}


def _monitors() -> list[BaseMetricsMonitor]:
    monitors: list[BaseMetricsMonitor] = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    with suppress(ImportError, RuntimeError):  # no nvidia-ml-py, or no GPU to speak of
        monitors.append(GPUMonitor())
    return monitors
