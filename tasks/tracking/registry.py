"""The registered model: its versions, who is champion, who is challenger."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import mlflow.artifacts
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from configs.settings import Settings, TrackingConfig
from dflash_core.config import FrozenModel
from tasks.tracking.run import TrackedRun, tracking_client
from tasks.tracking.spool import answered

__all__ = [
    "CHALLENGER",
    "CHAMPION",
    "PROFILE_NAME",
    "Registered",
    "add_version",
    "find_version",
    "set_alias",
]

T = TypeVar("T")
CHAMPION = "champion"
CHALLENGER = "challenger"
DRAFTER_FOLDER = "drafter"
PROFILE_NAME = "profile.json"


class Registered(FrozenModel):
    """A version of the registered model, with its files on this machine."""

    version: str
    """Number of the version."""
    drafter: Path
    """The export."""
    profile: Path
    """Length profile of what it was trained on."""
    tags: dict[str, str]
    """What was recorded of it."""


def add_version(
    run: TrackedRun, drafter: Path, settings: TrackingConfig, *, tags: Mapping[str, str]
) -> str:
    """Keep an export with its run, make it a version, and let it be the challenger.

    Returns:
        The version's number.

    Raises:
        TrackingError: MLflow is away for longer than the settings' patience.
    """
    run.log_files(drafter, DRAFTER_FOLDER)
    run_id = run.run_id  # once MLflow has the files
    client, name = run.client, settings.model_name

    def add() -> str:
        try:
            client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        # An answer may have been lost, and the version be there already.
        known = client.search_model_versions(f"name = '{name}' and run_id = '{run_id}'")
        source = f"runs:/{run_id}/{DRAFTER_FOLDER}"
        made = (
            known[0]
            if known
            else client.create_model_version(name, source, run_id, tags=dict(tags))
        )
        client.set_registered_model_alias(name, CHALLENGER, made.version)
        return str(made.version)

    return answered(client, add, patience_s=settings.patience_s)


def find_version(settings: Settings, alias: str, cache: Path) -> Registered | None:
    """Return the version behind an alias, its files fetched, or None when there is none.

    Raises:
        TrackingError: MLflow is away for longer than the settings' patience.
    """
    name = settings.tracking.model_name

    def find(client: MlflowClient) -> Registered | None:
        try:
            found = client.get_model_version_by_alias(name, alias)
        except MlflowException as error:
            if error.error_code in {"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"}:
                return None
            raise
        out = cache / f"registered-{name}-{found.version}-{str(found.run_id)[:8]}"
        drafter, profile = out / DRAFTER_FOLDER, out / PROFILE_NAME
        for path in (drafter, profile):
            if not path.exists():
                _fetch(client, str(found.run_id), path)
        return Registered(
            version=str(found.version), drafter=drafter, profile=profile, tags=dict(found.tags)
        )

    return _ask(settings, find)


def set_alias(settings: Settings, alias: str, version: str, *, reason: str) -> None:
    """Let an alias point to a version, and record why on it.

    Raises:
        TrackingError: MLflow is away for longer than the settings' patience.
    """
    name = settings.tracking.model_name

    def point(client: MlflowClient) -> None:
        client.set_model_version_tag(name, version, f"{alias}.reason", reason)
        client.set_registered_model_alias(name, alias, version)

    _ask(settings, point)


def _fetch(client: MlflowClient, run_id: str, path: Path) -> None:
    """Fetch an artifact of a run to a path, where it appears when all of it is there.

    Other runs under the root may fetch it now too, each into a folder of its own.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".", suffix=".part") as part:
        got = mlflow.artifacts.download_artifacts(
            run_id=run_id,
            artifact_path=path.name,
            dst_path=part,
            tracking_uri=client.tracking_uri,
        )
        try:
            Path(got).rename(path)
        except OSError:
            if not path.is_dir():  # else another run was faster
                raise


def _ask(settings: Settings, question: Callable[[MlflowClient], T]) -> T:
    client = tracking_client(settings.tracking, settings.run.root)
    return answered(client, lambda: question(client), patience_s=settings.tracking.patience_s)
