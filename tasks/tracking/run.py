"""MLflow as the flows use it: a parent run, nested runs, steps in batches, figures and tables.

Everything goes through a client with explicit addresses: no global state, nothing written into
the working folder. Messages pass through a spool, so an MLflow that is away stops nothing.
"""

import fcntl
import json
import logging
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run
from sqlalchemy.exc import SQLAlchemyError

from configs.addresses import without_secrets
from configs.settings import Settings, TrackingConfig
from dflash_core.artifacts import atomic_write
from dflash_core.errors import ArtifactError, ConfigError, Interrupted, TrackingError
from tasks.console import warn
from tasks.places.run_folder import RunFolder, held_folder
from tasks.tracking.spool import SPOOL_NAME, Spool, now_ms, shown_uri

__all__ = [
    "StepMetrics",
    "TrackedRun",
    "deliver_pending",
    "open_tracking",
    "tracking_client",
]

CHUNK = 800  # MLflow takes at most 1,000 metrics and 100 parameters in a call
PARAM_CHUNK = 100
PARAM_LENGTH = 500
# MLflow's own defaults keep a caller for minutes; the spool tries again later instead.
HTTP = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}


class TrackedRun:
    """One MLflow run, reached through the spool of its flow run.

    Args:
        spool: Takes the messages.
        key: Names the run in the spool.
        settings: Say how long to wait for MLflow where an answer is needed.
        experiment: Experiment and where a new one keeps its artifacts.
    """

    def __init__(
        self, spool: Spool, key: str, settings: TrackingConfig, experiment: tuple[str, str | None]
    ) -> None:
        self._spool = spool
        self._key = key
        self._settings = settings
        self._experiment = experiment
        self._tables: list[dict[str, str]] = []

    @property
    def client(self) -> MlflowClient:
        """The client, for what needs an answer."""
        return self._spool.client

    @property
    def run_id(self) -> str:
        """MLflow's id of the run, once MLflow has everything told so far; waits for it."""
        return self._spool.run_id(self._key, patience_s=self._settings.patience_s)

    def check_taken(self) -> None:
        """Refuse a run that MLflow will not take; one that is away may still do so.

        Raises:
            ConfigError: MLflow has refused it.
        """
        reason = self._spool.refusal(self._key)
        if reason is not None:
            raise ConfigError(
                f"MLflow at {shown_uri(self.client)} takes no run in the experiment "
                f"'{self._experiment[0]}': {reason}; restore the experiment there, or set "
                "tracking.experiment to another name"
            )

    @contextmanager
    def child(self, name: str, tags: Mapping[str, str] | None = None) -> Iterator["TrackedRun"]:
        """Open a nested run, ended with the outcome of the block."""
        with _opened(
            self._spool, self._settings, self._experiment, name, tags or {}, self._key
        ) as run:
            yield run

    def log_params(self, values: Mapping[str, Any]) -> None:
        """Log a nested mapping as dotted parameters."""
        params = [(key, str(value)[:PARAM_LENGTH]) for key, value in _flatten(values)]
        for start in range(0, len(params), PARAM_CHUNK):
            self._put("params", values=dict(params[start : start + PARAM_CHUNK]))

    def log_metrics(self, values: Mapping[str, float], *, step: int = 0) -> None:
        """Log figures."""
        self.log_steps([{"step": step, **values}])

    def log_steps(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Log many steps at once; each line names its ``step``, lists become numbered figures."""
        now = now_ms()
        rows = [
            (name, value, now, int(line["step"]))
            for line in lines
            for name, value in _numbers(line)
        ]
        for start in range(0, len(rows), CHUNK):
            self._put("metrics", rows=rows[start : start + CHUNK])

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags."""
        self._put("tags", values=dict(tags))

    def log_dataset(
        self, name: str, *, digest: str, source: str, profile: Mapping[str, Any]
    ) -> None:
        """Name the data that the run reads: where it lies, its content and its counts."""
        values = {
            "name": name,
            "digest": digest[:36],
            "source_type": "local",
            "source": json.dumps({"uri": source}),
            "profile": json.dumps(dict(profile)),
        }
        self._put("dataset", values=values, context="training")

    def log_json(self, name: str, value: Any) -> None:
        """Keep a JSON-able value as an artifact."""
        self._keep(name, json.dumps(value, indent=1))

    def log_table(self, name: str, columns: Mapping[str, list[Any]]) -> None:
        """Keep a table that the MLflow page shows."""
        rows = [list(row) for row in zip(*columns.values(), strict=True)]
        self._keep(name, json.dumps({"columns": list(columns), "data": rows}))
        self._tables.append({"path": name, "type": "table"})
        self.set_tags({"mlflow.loggedArtifacts": json.dumps(self._tables)})

    def log_figure(self, name: str, figure: Figure) -> None:
        """Keep a figure in the format that its name ends with."""
        file = self._file(name)
        figure.savefig(file)
        self.log_files(file, _folder_of(name))

    def log_files(self, path: Path, folder: str | None = None) -> None:
        """Keep a file or a folder."""
        self._put("file", path=str(path.resolve()), folder=folder)

    def _keep(self, name: str, text: str) -> None:
        self.log_files(atomic_write(self._file(name), text), _folder_of(name))

    def _file(self, name: str) -> Path:
        file = self._spool.files / self._key / name
        file.parent.mkdir(parents=True, exist_ok=True)
        return file

    def _put(self, kind: str, **values: Any) -> None:
        self._spool.put(kind, self._key, values)


class StepMetrics:
    """Hands training steps over, each once, however often its lines are read.

    Args:
        run: Where steps go.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        self._last_step = 0

    def deliver(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Hand over the lines of steps that are new."""
        new = [line for line in lines if line["step"] > self._last_step]
        if new:
            self._last_step = max(line["step"] for line in new)
            self._run.log_steps(new)


def tracking_client(config: TrackingConfig, root: Path) -> MlflowClient:
    """Return a client of the MLflow in use; a SQLite file under the root of all runs by default.

    Raises:
        TrackingError: MLflow cannot work there: a scheme it does not know, a damaged database.
    """
    for name, value in HTTP.items():
        os.environ.setdefault(name, value)
    # Each of its retries would be a line beside the one sentence that the spool says.
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
    uri = _server(config)
    if uri is not None:
        return _client(uri)
    store = root.resolve() / "mlflow"
    store.mkdir(parents=True, exist_ok=True)
    uri = f"sqlite:///{store / 'mlflow.db'}"
    with (store / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two at once would both make its tables, and fail
        return _client(uri)


def _client(uri: str) -> MlflowClient:
    try:
        return MlflowClient(tracking_uri=uri, registry_uri=uri)
    except (MlflowException, SQLAlchemyError) as error:
        reason = str(error).strip().splitlines()[0].split(". ")[0]
        raise TrackingError(
            f"MLflow cannot work with {without_secrets(uri)}: {without_secrets(reason)}; mend that "
            "place, or set tracking.uri to another"
        ) from None


def deliver_pending(root: Path, client: MlflowClient) -> dict[str, int]:
    """Send what runs under a root could not send; one that is being worked on is left alone.

    Returns:
        Messages that still wait, by name of the run, of all runs that had any.
    """
    left = {}
    for folder in Spool.unfinished(root, client):
        name = folder.parent.name
        try:
            with held_folder(folder.parent, place="run.root", name="run.name"):
                spool = Spool(folder, client)
                spool.end_orphans()
                spool.send(now=True)
                left[name] = spool.num_waiting
        except ConfigError:
            continue  # somebody works there, and will deliver it
        except ArtifactError as error:
            warn(f"{name} is left out: {error}")
    return left


@contextmanager
def open_tracking(settings: Settings, folder: RunFolder) -> Iterator[TrackedRun]:
    """Open the parent run of a flow run, with tags that lead to it.

    What earlier runs could not send goes first, and runs that a killed process left open are ended.

    Args:
        settings: Say where MLflow is; the experiment is named after the target by default.
        folder: The run's folder; its root holds the database when no server is named.

    Raises:
        ConfigError: MLflow refuses the run: its experiment was deleted, say.
    """
    config = settings.tracking
    spool = Spool(folder.path / SPOOL_NAME, tracking_client(config, folder.root))
    spool.end_orphans()
    artifacts = None if _server(config) else (folder.root / "mlflow" / "artifacts").as_uri()
    experiment = (config.experiment or settings.target.path.name, artifacts)
    tags = {
        "prefect.flow_run_id": str(flow_run.id),
        "prefect.flow_run_name": str(flow_run.name),
        "prefect.flow_name": str(flow_run.flow_name),
    }
    try:
        with _opened(spool, config, experiment, folder.name, tags, None) as run:
            run.check_taken()
            if not spool.num_waiting:
                deliver_pending(folder.root, spool.client)
            yield run
    finally:
        if not spool.send(now=True):
            warn(
                f"{spool.num_waiting} messages did not reach MLflow; the next run in {folder.root} "
                "delivers them, or dflash-flow runs --deliver"
            )


@contextmanager
def _opened(
    spool: Spool,
    settings: TrackingConfig,
    experiment: tuple[str, str | None],
    name: str,
    tags: Mapping[str, str],
    parent: str | None,
) -> Iterator[TrackedRun]:
    key = uuid.uuid4().hex
    spool.put(
        "create",
        key,
        {
            "experiment": experiment[0],
            "artifacts": experiment[1],
            "name": name,
            "tags": dict(tags),
            "parent": parent,
            "at_ms": now_ms(),
        },
    )
    status = "FAILED"
    try:
        yield TrackedRun(spool, key, settings, experiment)
        status = "FINISHED"
    except (KeyboardInterrupt, Interrupted, TerminationSignal):  # the last cancels a flow run
        status = "KILLED"
        raise
    finally:
        spool.put("end", key, {"status": status, "at_ms": now_ms()})


def _server(config: TrackingConfig) -> str | None:
    return config.uri or os.environ.get("MLFLOW_TRACKING_URI")


def _folder_of(name: str) -> str | None:
    parent = str(Path(name).parent)
    return None if parent == "." else parent


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
