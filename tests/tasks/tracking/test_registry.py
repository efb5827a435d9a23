"""The registered model on a real MLflow database whose answers get lost."""

from pathlib import Path
from typing import Any

import mlflow.artifacts
import pytest
from mlflow import MlflowClient

from configs.settings import RunConfig, Settings, TrackingConfig
from dflash_core.errors import TrackingError
from dflash_core.target.config import TargetConfig
from tasks.places.run_folder import open_run_folder
from tasks.tracking.registry import CHALLENGER, PROFILE_NAME, add_version, find_version, set_alias
from tasks.tracking.run import TrackedRun, open_tracking


class Forgetful:
    """A client whose first answers to some questions are lost on their way back."""

    def __init__(self, client: MlflowClient, *lost: str) -> None:
        self._client = client
        self._lost = list(lost)

    def __getattr__(self, name: str) -> Any:
        def ask(*arguments: Any, **more: Any) -> Any:
            answer = getattr(self._client, name)(*arguments, **more)
            if name in self._lost:
                self._lost.remove(name)
                raise ConnectionError("the answer is lost")
            return answer

        return self._client.tracking_uri if name == "tracking_uri" else ask


def registered(root: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Settings, Path]:
    """Register a version although answers get lost; return settings and cache of its run."""
    settings = Settings(target=TargetConfig(path=Path("t")), run=RunConfig(root=root))
    drafter = root / "export"
    drafter.mkdir()
    (drafter / "config.json").write_text("{}")
    with (
        open_run_folder(settings.run, default_name="run") as folder,
        open_tracking(settings, folder) as run,
    ):
        run.log_json(PROFILE_NAME, {})
        forgetful = Forgetful(run.client, "create_registered_model", "create_model_version")
        monkeypatch.setattr(TrackedRun, "client", forgetful)
        assert add_version(run, drafter, settings.tracking, tags={"tau": "2"}) == "1"
    return settings, folder.cache


def test_a_version_is_added_once_and_found_with_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, cache = registered(tmp_path, monkeypatch)
    found = find_version(settings, CHALLENGER, cache)
    assert found is not None and found.tags == {"tau": "2"}
    assert (found.drafter / "config.json").read_text() == "{}" and found.profile.is_file()
    assert sorted(p.name for p in found.profile.parent.iterdir()) == ["drafter", "profile.json"]
    assert find_version(settings, "champion", cache) is None


def test_two_runs_fetch_the_same_version_without_a_trace_of_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second fetches all of it while the first is in the middle of it."""
    settings, cache = registered(tmp_path, monkeypatch)
    caplog.clear()  # of the answers lost before
    download = mlflow.artifacts.download_artifacts

    def slow(**words: Any) -> str:
        with monkeypatch.context() as other:
            other.setattr(mlflow.artifacts, "download_artifacts", download)
            find_version(settings, CHALLENGER, cache)
        return download(**words)

    monkeypatch.setattr(mlflow.artifacts, "download_artifacts", slow)
    found = find_version(settings, CHALLENGER, cache)
    assert found is not None and (found.drafter / "config.json").read_text() == "{}"
    assert sorted(p.name for p in found.profile.parent.iterdir()) == ["drafter", "profile.json"]
    assert "does not answer" not in caplog.text


def test_an_mlflow_that_is_away_is_waited_for_and_then_said(tmp_path: Path) -> None:
    tracking = TrackingConfig(uri="http://127.0.0.1:9", patience_s=0)
    settings = Settings(
        target=TargetConfig(path=Path("t")), run=RunConfig(root=tmp_path), tracking=tracking
    )
    for ask in (
        lambda: find_version(settings, "champion", tmp_path),
        lambda: set_alias(settings, "champion", "1", reason="x"),
    ):
        with pytest.raises(TrackingError, match=r"127\.0\.0\.1:9 has not answered for 0 s"):
            ask()
