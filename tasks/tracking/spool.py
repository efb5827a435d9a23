"""What MLflow is told, written down first: training goes on without it, and nothing comes twice.

Every message is a line of ``journal.jsonl`` in the run's folder before it is sent, and a cursor
says how many were taken. A crash between the two repeats a message, so messages are made to be
repeated: metrics carry their own time, which makes them the same rows, and a run is looked up by
its key before it is made.
"""

import json
import os
import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from requests.exceptions import RequestException
from sqlalchemy.exc import SQLAlchemyError

from configs.addresses import without_secrets
from dflash_core.artifacts import atomic_write
from dflash_core.errors import ArtifactError, ConfigError, TrackingError
from tasks.console import announce, warn

__all__ = ["SPOOL_NAME", "Spool", "answered", "now_ms", "shown_uri"]

T = TypeVar("T")
SPOOL_NAME = "tracking"
JOURNAL_NAME = "journal.jsonl"
CURSOR_NAME = "cursor.json"
MARK_NAME = "unfinished"
KEY_TAG = "dflash.run"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
# What MLflow will not take however often it is offered; everything else counts as an outage.
REFUSALS = {
    "BAD_REQUEST",
    "INVALID_PARAMETER_VALUE",
    "NOT_FOUND",
    "RESOURCE_ALREADY_EXISTS",
    "RESOURCE_DOES_NOT_EXIST",
}
OUTAGES = (MlflowException, RequestException, SQLAlchemyError, OSError)


class Spool:
    """The messages of one flow run's MLflow runs, in order.

    Args:
        folder: Where journal and cursor lie; an earlier process's rest is sent first.
        client: Where messages go.

    Raises:
        ArtifactError: Journal or cursor are damaged.
        ConfigError: What waits there is for another MLflow.
    """

    def __init__(self, folder: Path, client: MlflowClient) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.client = client
        self.files = folder / "files"
        self._journal = folder / JOURNAL_NAME
        self._cursor = folder / CURSOR_NAME
        self._mark = folder / MARK_NAME
        self._lock = threading.RLock()
        self._sent = 0
        self._ids: dict[str, str] = {}
        self._refused: dict[str, str] = {}
        earlier = _read_lines(self._journal)
        if self._cursor.is_file():
            state = _read_cursor(self._cursor)
            # A crash may have come between a journal's end and its cursor's.
            self._sent, self._ids = min(state["sent"], len(earlier)), state["ids"]
            if state["uri"] != shown_uri(client):
                earlier = self._leave(state["uri"], num_waiting=len(earlier) - self._sent)
        self._waiting = deque(earlier[self._sent :])
        self._open: dict[str, None] = {}
        for message in earlier:
            self._note(message)
        self._pause_s = 0.0
        self._not_before = 0.0
        self._save()

    @staticmethod
    def unfinished(root: Path, client: MlflowClient) -> list[Path]:
        """Return the folders with messages for this MLflow, or with runs that nobody has ended."""
        uri = shown_uri(client)
        folders = [mark.parent for mark in sorted(root.glob(f"*/{SPOOL_NAME}/{MARK_NAME}"))]
        return [folder for folder in folders if _uri_of(folder, otherwise=uri) == uri]

    @property
    def num_waiting(self) -> int:
        """Messages that MLflow has not taken yet."""
        return len(self._waiting)

    def put(self, kind: str, run: str, said: dict[str, Any]) -> None:
        """Write a message down and send what can be sent.

        Args:
            kind: create, params, metrics, tags, dataset, file or end.
            run: The run's key.
            said: What the message says; JSON-able.
        """
        message = {"kind": kind, "run": run, **said}
        with self._lock:
            self._mark.touch()
            _append(self._journal, json.dumps(message) + "\n")
            self._waiting.append(message)
            self._note(message)
            self.send()

    def send(self, *, now: bool = False) -> bool:
        """Send what waits; returns whether all of it arrived.

        Args:
            now: Try even if MLflow did not answer a moment ago.
        """
        with self._lock:
            if not now and time.monotonic() < self._not_before:
                return False
            while self._waiting:
                if not self._try(self._waiting[0]):
                    return False
                self._waiting.popleft()
                self._sent += 1
                self._save()
            if not self._open:
                self._mark.unlink(missing_ok=True)
            return True

    def refusal(self, run: str) -> str | None:
        """Return why MLflow did not take a run; None for one that it took, or may still take."""
        return self._refused.get(run)

    def run_id(self, run: str, *, patience_s: float) -> str:
        """Return MLflow's id of a run, waiting for an MLflow that is away.

        Raises:
            TrackingError: MLflow did not answer for that long, or refuses the run.
        """
        deadline = time.monotonic() + patience_s
        while not self.send(now=True):
            if time.monotonic() > deadline:
                raise _no_answer(self.client, patience_s)
            time.sleep(min(self._pause_s, LONGEST_PAUSE_S))
        if run not in self._ids:
            raise TrackingError(
                f"MLflow at {shown_uri(self.client)} refused this run "
                f"({self.refusal(run) or 'earlier'}); settle that there and run the same command "
                "again"
            )
        return self._ids[run]

    def end_orphans(self) -> None:
        """End the runs that a killed process left open."""
        for run in reversed(list(self._open)):
            self.put("end", run, {"status": "KILLED", "at_ms": now_ms()})

    def _save(self) -> None:
        state = {"uri": shown_uri(self.client), "sent": self._sent, "ids": self._ids}
        atomic_write(self._cursor, json.dumps(state))

    def _leave(self, uri: str, *, num_waiting: int) -> list[dict[str, Any]]:
        """Forget an MLflow that has everything; another one takes over."""
        if num_waiting:
            folder = self._journal.parent
            where = shlex.join(["--root", str(folder.parent.parent), "--uri", uri])
            raise ConfigError(
                f"{folder} holds {num_waiting} messages for MLflow at {uri}, but "
                f"this process uses {shown_uri(self.client)}; deliver them with 'dflash-flow runs "
                f"--deliver {where}', or set run.name to another name"
            )
        self._journal.unlink(missing_ok=True)
        self._sent, self._ids = 0, {}
        return []

    def _note(self, message: Mapping[str, Any]) -> None:
        if message["kind"] == "create":
            self._open[message["run"]] = None
        elif message["kind"] == "end":
            self._open.pop(message["run"], None)

    def _try(self, message: Mapping[str, Any]) -> bool:
        try:
            self._deliver(message)
        except OUTAGES as error:
            if _is_refusal(error):
                warn(f"MLflow refuses {message['kind']}: {_reason(error)}")
                if message["kind"] == "create":
                    self._refused[message["run"]] = _reason(error).rstrip(".")
                return True
            if not self._pause_s:
                warn(
                    f"MLflow at {shown_uri(self.client)} does not answer ({_reason(error)}); "
                    f"what it should know is kept in {self._journal}"
                )
            self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            self._not_before = time.monotonic() + self._pause_s
            return False
        if self._pause_s:
            announce(f"MLflow answers again; {self.num_waiting} messages follow")
        self._pause_s = 0.0
        return True

    def _deliver(self, message: Mapping[str, Any]) -> None:
        kind, run = message["kind"], message["run"]
        if kind == "create":
            self._ids[run] = self._create(message)
            return
        if run not in self._ids:
            return  # MLflow refused the run itself, and said so then
        run_id, client = self._ids[run], self.client
        if kind == "params":
            client.log_batch(run_id, params=[Param(k, v) for k, v in message["values"].items()])
        elif kind == "metrics":
            client.log_batch(run_id, metrics=[Metric(*row) for row in message["rows"]])
        elif kind == "tags":
            client.log_batch(run_id, tags=[RunTag(k, v) for k, v in message["values"].items()])
        elif kind == "dataset":
            tags = [InputTag("mlflow.data.context", message["context"])]
            client.log_inputs(run_id, datasets=[DatasetInput(Dataset(**message["values"]), tags)])
        elif kind == "file":
            self._send_file(run_id, Path(message["path"]), message["folder"])
        else:
            client.set_terminated(run_id, message["status"], message["at_ms"])

    def _send_file(self, run_id: str, path: Path, folder: str | None) -> None:
        if not path.exists():
            warn(f"{path} is gone before MLflow could take it")
        elif path.is_dir():
            self.client.log_artifacts(run_id, str(path), folder)
        else:
            self.client.log_artifact(run_id, str(path), folder)

    def _create(self, message: Mapping[str, Any]) -> str:
        experiment_id = self._experiment(message["experiment"], message["artifacts"])
        key = message["run"]
        found = self.client.search_runs([experiment_id], f"tags.`{KEY_TAG}` = '{key}'")
        if found:
            return found[0].info.run_id
        parent_id = self._ids.get(message["parent"])  # MLflow may have refused the parent
        nested = {"mlflow.parentRunId": parent_id} if parent_id else {}
        tags = {**message["tags"], **nested, KEY_TAG: key}
        made = self.client.create_run(
            experiment_id, start_time=message["at_ms"], tags=tags, run_name=message["name"]
        )
        return made.info.run_id

    def _experiment(self, name: str, artifacts: str | None) -> str:
        found = self.client.get_experiment_by_name(name)
        if found is not None:
            return found.experiment_id
        try:
            return self.client.create_experiment(name, artifact_location=artifacts)
        except MlflowException as error:
            found = self.client.get_experiment_by_name(name)  # another process was faster
            if found is None:
                raise error
            return found.experiment_id


def answered(client: MlflowClient, ask: Callable[[], T], *, patience_s: float) -> T:
    """Return MLflow's answer, asking again while it is away; its refusals are raised.

    Args:
        client: Where MLflow is.
        ask: Asks; may be repeated.
        patience_s: How long to go on asking.

    Raises:
        TrackingError: MLflow did not answer for that long.
    """
    deadline = time.monotonic() + patience_s
    pause_s = 0.0
    while True:
        try:
            return ask()
        except OUTAGES as error:
            if _is_refusal(error):
                raise
            if time.monotonic() > deadline:
                raise _no_answer(client, patience_s) from error
            if not pause_s:
                warn(
                    f"MLflow at {shown_uri(client)} does not answer ({_reason(error)}); "
                    f"waiting for it up to {patience_s:g} s (tracking.patience_s)"
                )
        pause_s = min(max(2 * pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        time.sleep(pause_s)


def shown_uri(client: MlflowClient) -> str:
    """Return where a client sends to, with a password hidden."""
    return without_secrets(str(client.tracking_uri))


def now_ms() -> int:
    """Return the time as MLflow counts it."""
    return int(time.time() * 1000)


def _is_refusal(error: Exception) -> bool:
    return isinstance(error, MlflowException) and error.error_code in REFUSALS


def _reason(error: BaseException) -> str:
    """Return what lies at the bottom of an error; HTTP clients wrap a refusal four times."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return without_secrets((str(error).splitlines() or [type(error).__name__])[0])


def _no_answer(client: MlflowClient, patience_s: float) -> TrackingError:
    return TrackingError(
        f"MLflow at {shown_uri(client)} has not answered for {patience_s:g} s "
        "(tracking.patience_s); start it and run the same command again"
    )


def _append(file: Path, line: str) -> None:
    """Append a line as a whole or not at all: on a full disk, the next would be glued to it."""
    size = file.stat().st_size if file.is_file() else 0
    try:
        with file.open("a") as stream:
            stream.write(line)
    except OSError:
        if file.is_file():
            os.truncate(file, size)
        raise


def _uri_of(folder: Path, *, otherwise: str) -> str:
    """Return which MLflow a journal is for; a damaged cursor is told once the spool is opened."""
    try:
        return _read_cursor(folder / CURSOR_NAME)["uri"]
    except ArtifactError:
        return otherwise


def _read_cursor(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"{file} is damaged or cannot be read ({error}); mend it, or delete {file.parent} and "
            "with it what MLflow has not got"
        ) from None


def _read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the messages of a journal; a last line cut short by a crash was never sent."""
    if not file.is_file():
        return []
    text = file.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        atomic_write(file, whole)
    messages = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            messages.append(json.loads(line))
        except ValueError:
            raise ArtifactError(
                f"line {number} of {file} is damaged; delete that line, which MLflow then does "
                "not get, and run the same command again"
            ) from None
    return messages
