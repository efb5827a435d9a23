"""The registered model: its versions, who is champion, who is challenger."""

from collections.abc import Mapping
from pathlib import Path

import mlflow.artifacts
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from configs.settings import Settings
from dflash_core.config import FrozenModel
from tasks.tracking import TrackedRun, tracking_client

__all__ = [
    "CHALLENGER",
    "CHAMPION",
    "PROFILE_NAME",
    "Registered",
    "add_version",
    "find_version",
    "set_alias",
]

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


def add_version(run: TrackedRun, drafter: Path, *, name: str, tags: Mapping[str, str]) -> str:
    """Keep an export with its run, make it a version, and let it be the challenger.

    Returns:
        The version's number.
    """
    run.log_files(drafter, DRAFTER_FOLDER)
    run_id = run.run_id  # once MLflow has the files
    try:
        run.client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    source = f"runs:/{run_id}/{DRAFTER_FOLDER}"
    made = run.client.create_model_version(name, source, run_id, tags=dict(tags))
    run.client.set_registered_model_alias(name, CHALLENGER, made.version)
    return str(made.version)


def find_version(settings: Settings, alias: str, cache: Path) -> Registered | None:
    """Return the version behind an alias, its files fetched, or None when there is none."""
    client = _client(settings)
    name = settings.tracking.model_name
    try:
        found = client.get_model_version_by_alias(name, alias)
    except MlflowException as error:
        if error.error_code in {"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"}:
            return None
        raise
    out = cache / f"registered-{name}-{found.version}"
    drafter, profile = out / DRAFTER_FOLDER, out / PROFILE_NAME
    out.mkdir(parents=True, exist_ok=True)
    for path in (drafter, profile):
        if not path.exists():
            mlflow.artifacts.download_artifacts(
                run_id=found.run_id,
                artifact_path=path.name,
                dst_path=str(out),
                tracking_uri=client.tracking_uri,
            )
    return Registered(
        version=str(found.version), drafter=drafter, profile=profile, tags=dict(found.tags)
    )


def set_alias(settings: Settings, alias: str, version: str, *, reason: str) -> None:
    """Let an alias point to a version, and record why on it."""
    client = _client(settings)
    name = settings.tracking.model_name
    client.set_model_version_tag(name, version, f"{alias}.reason", reason)
    client.set_registered_model_alias(name, alias, version)


def _client(settings: Settings) -> MlflowClient:
    return tracking_client(settings.tracking, settings.run.root)
