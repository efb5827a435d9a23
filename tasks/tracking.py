"""MLflow as the flows use it: a parent run, nested runs, steps in batches, a registered model.

Everything goes through a client with explicit addresses: no global state, nothing written into
the working folder. What MLflow refuses while training runs is kept and delivered later.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from prefect.runtime import flow_run

from configs.settings import Settings, TrackingConfig
from tasks.console import logger
from tasks.run_folder import RunFolder

__all__ = ["StepMetrics", "TrackedRun", "open_tracking", "tracking_client"]

CHUNK = 800  # MLflow takes at most 1,000 metrics and 100 parameters in a call
PARAM_CHUNK = 100
PARAM_LENGTH = 500


class TrackedRun:
    """One MLflow run."""

    def __init__(self, client: MlflowClient, experiment_id: str, run_id: str) -> None:
        self.client = client
        self.experiment_id = experiment_id
        self.run_id = run_id

    @contextmanager
    def child(self, name: str, tags: Mapping[str, str] | None = None) -> Iterator["TrackedRun"]:
        """Open a nested run, ended with the outcome of the block."""
        nested = {"mlflow.parentRunId": self.run_id, **(tags or {})}
        with _started(self.client, self.experiment_id, name, nested) as run:
            yield run

    def log_params(self, values: Mapping[str, Any]) -> None:
        """Log a nested mapping as dotted parameters."""
        params = [Param(k, str(v)[:PARAM_LENGTH]) for k, v in _flatten(values)]
        for start in range(0, len(params), PARAM_CHUNK):
            self.client.log_batch(self.run_id, params=params[start : start + PARAM_CHUNK])

    def log_metrics(self, values: Mapping[str, float], *, step: int = 0) -> None:
        """Log figures."""
        self.log_steps([{"step": step, **values}])

    def log_steps(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Log many steps at once; each line names its ``step``, lists become numbered figures."""
        now = int(time.time() * 1000)
        metrics = [
            Metric(name, float(value), now, int(line["step"]))
            for line in lines
            for name, value in _numbers(line)
        ]
        for start in range(0, len(metrics), CHUNK):
            self.client.log_batch(self.run_id, metrics=metrics[start : start + CHUNK])

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags."""
        self.client.log_batch(self.run_id, tags=[RunTag(k, v) for k, v in tags.items()])

    def log_json(self, name: str, value: Any) -> None:
        """Keep a JSON-able value as an artifact."""
        self.client.log_dict(self.run_id, value, name)

    def log_table(self, name: str, columns: Mapping[str, list[Any]]) -> None:
        """Keep a table that the MLflow page shows."""
        self.client.log_table(self.run_id, dict(columns), name)

    def log_figure(self, name: str, figure: Figure) -> None:
        """Keep a figure as SVG."""
        self.client.log_figure(self.run_id, figure, name)

    def log_files(self, path: Path, folder: str | None = None) -> None:
        """Keep a file or a folder."""
        if path.is_dir():
            self.client.log_artifacts(self.run_id, str(path), folder)
        else:
            self.client.log_artifact(self.run_id, str(path), folder)


class StepMetrics:
    """Delivers training steps to MLflow, each once, however often MLflow is away.

    Args:
        run: Where steps go.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        self._waiting: list[Mapping[str, Any]] = []
        self._last_step = 0
        self._away = False

    def deliver(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Send new lines, with those that could not be sent before."""
        self._waiting += [line for line in lines if line["step"] > self._last_step]
        if not self._waiting:
            return
        try:
            self._run.log_steps(self._waiting)
        except (MlflowException, OSError) as error:
            if not self._away:
                logger().warning("MLflow does not answer (%s); steps are kept for later", error)
            self._away = True
            return
        self._away = False
        self._last_step = max(line["step"] for line in self._waiting)
        self._waiting = []

    def finish(self) -> None:
        """Send what is left; what still cannot be sent stays in the run's metrics.jsonl."""
        self.deliver([])
        if self._waiting:
            logger().warning(
                "%d steps did not reach MLflow; they are in metrics.jsonl", len(self._waiting)
            )


def tracking_client(config: TrackingConfig, root: Path) -> MlflowClient:
    """Return a client of the named server, or of the SQLite file under the root of all runs."""
    store = root.resolve() / "mlflow"
    if config.uri is None:
        store.mkdir(parents=True, exist_ok=True)
    uri = config.uri or f"sqlite:///{store / 'mlflow.db'}"
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


@contextmanager
def open_tracking(settings: Settings, folder: RunFolder) -> Iterator[TrackedRun]:
    """Open the parent run of a flow run, with tags that lead to it.

    Args:
        settings: Say where MLflow is; the experiment is named after the target by default.
        folder: The run's folder; its root holds the database when no server is named.
    """
    config = settings.tracking
    client = tracking_client(config, folder.root)
    name = config.experiment or settings.target.path.name
    tags = {
        "prefect.flow_run_id": str(flow_run.id),
        "prefect.flow_run_name": str(flow_run.name),
        "prefect.flow_name": str(flow_run.flow_name),
    }
    found = client.get_experiment_by_name(name)
    if found is None:
        artifacts = None if config.uri else (folder.root / "mlflow" / "artifacts").as_uri()
        experiment_id = client.create_experiment(name, artifact_location=artifacts)
    else:
        experiment_id = found.experiment_id
    with _started(client, experiment_id, folder.name, tags) as run:
        yield run


@contextmanager
def _started(
    client: MlflowClient, experiment_id: str, name: str, tags: Mapping[str, str]
) -> Iterator[TrackedRun]:
    info = client.create_run(experiment_id, run_name=name, tags=dict(tags)).info
    status = "FAILED"
    try:
        yield TrackedRun(client, experiment_id, info.run_id)
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        try:
            client.set_terminated(info.run_id, status)
        except (MlflowException, OSError) as error:
            logger().warning("MLflow did not take the end of run %s: %s", info.run_id, error)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _numbers(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in line.items():
        if isinstance(value, bool | int | float) and name != "step":
            yield name, float(value)
        elif isinstance(value, list | Mapping):
            pairs = value.items() if isinstance(value, Mapping) else enumerate(value, start=1)
            for key, item in pairs:
                if item is not None:  # null stands for what is not finite
                    yield f"{name}/{key}", float(item)
