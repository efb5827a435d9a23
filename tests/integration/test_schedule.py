"""A schedule that fires: the first drafter is crowned, no news is skipped, the worse one waits."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from mlflow import MlflowClient

from configs.settings import Settings
from tests.flows.conftest import MakeSettings
from tests.integration.places import ROOT, Place, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]

EVERY_S = 15
LIVE = ("PENDING", "RUNNING")
# The first step decays every matrix to nothing: whatever was learnt is gone. A huge learning rate
# would still learn the one token that a random target likes best.
RUINOUS = {"learning_rate": 1e-6, "weight_decay": 1e6, "warmup_ratio": 0.0}
ALONE = {"topology": {"num_ranks": 1}, "checkpoint_every_steps": 99}


@pytest.fixture
def no_schedule_afterwards(place: Place) -> Iterator[None]:
    """End the schedule with the test: its runs would slow all tests after it."""
    yield
    place.shell("deployment", "delete", "retrain/weekly")


@pytest.mark.usefixtures("no_schedule_afterwards")
def test_promote_skip_and_keep_the_champion_on_schedule(
    place: Place, tiny_settings: MakeSettings, tiny_parts: Path, tmp_path: Path
) -> None:
    chats = Path(shutil.copy(tiny_parts / "chats.jsonl", tmp_path / "chats.jsonl"))
    settings = tiny_settings(
        run={"root": tmp_path / "runs"},
        corpus={"inputs": [chats], "max_samples": None},
        compare={"strategies": ["bucketed"]},
        training={**ALONE, "epochs": 30, "optimizer": {"learning_rate": 0.01}},
        evaluation={"max_prompts": 8},
        tracking={"model_name": "scheduled"},
    )
    schedule(place, settings, tmp_path)
    ends = wait_for(lambda: at_least(2, ended(place)), timeout_s=480, what="two scheduled runs")
    assert [run["state"]["name"] for run in ends] == ["Completed", "Skipped"]
    assert versions(settings) == {"champion": 1, "challenger": 1}

    training = tiny_settings(training={**ALONE, "epochs": 1, "optimizer": RUINOUS}).training
    schedule(place, settings.model_copy(update={"training": training}), tmp_path)
    # Late runs keep the parameters they were scheduled with: one of them would train well.
    wait_for(lambda: not outdated(place), what="the old runs' end")
    with chats.open("a") as file:
        for text in ("def double(x):\n    return 2 * x", "def half(x):\n    return x / 2"):
            row = [{"role": "user", "content": text[:8]}, {"role": "assistant", "content": text}]
            file.write(json.dumps({"messages": row}) + "\n")
    wait_for(lambda: versions(settings)["challenger"] == 2, timeout_s=480, what="a challenger")
    reason = wait_for(lambda: tags(settings, "2").get("challenger.reason"), what="the verdict")
    assert reason.startswith("version 1 stays champion: tau "), reason
    gain = float(reason.split("gain ")[1].split()[0])
    assert gain < 0, reason
    until_now = len(ended(place))
    later = wait_for(lambda: ended(place)[until_now + 1 :], what="the runs after it")
    assert {run["state"]["name"] for run in later} == {"Skipped"}, "a loser is not trained again"
    assert versions(settings) == {"champion": 1, "challenger": 2}


def schedule(place: Place, settings: Settings, folder: Path) -> None:
    """Deploy ``retrain/weekly`` of prefect.yaml with these settings and a schedule of seconds."""
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    (entry,) = (entry for entry in deployments if entry["name"] == "weekly")
    entry["parameters"] = {"settings": settings.model_dump(mode="json")}
    entry["schedules"] = [{"interval": EVERY_S, "active": True}]
    file = folder / "prefect.yaml"
    file.write_text(yaml.safe_dump({"name": "scheduled", "deployments": [entry]}))
    place.shell("deploy", "--all", "--prefect-file", str(file))


def scheduled(place: Place, *types: str) -> list[dict[str, Any]]:
    where = {"state": {"type": {"any_": list(types)}}}
    return place.flow_runs(deployments={"name": {"any_": ["weekly"]}}, flow_runs=where)


def ended(place: Place) -> list[dict[str, Any]]:
    return scheduled(place, "COMPLETED", "FAILED", "CRASHED")


def outdated(place: Place) -> list[dict[str, Any]]:
    """Return runs under way with the first settings, after dropping those that are only due."""
    for run in scheduled(place, "SCHEDULED"):
        if epochs(run) == 30:
            # A busy server may say no; what is left is found below and tried again.
            httpx.delete(f"{place.api_url}/flow_runs/{run['id']}", timeout=30)
    return [run for run in scheduled(place, "SCHEDULED", *LIVE) if epochs(run) == 30]


def epochs(run: dict[str, Any]) -> int:
    return run["parameters"]["settings"]["training"]["epochs"]


def at_least(count: int, found: list[Any]) -> list[Any]:
    return found[:count] if len(found) >= count else []


def client(settings: Settings) -> MlflowClient:
    return MlflowClient(f"sqlite:///{settings.run.root / 'mlflow' / 'mlflow.db'}")


def tags(settings: Settings, version: str) -> dict[str, str]:
    return client(settings).get_model_version("scheduled", version).tags


def versions(settings: Settings) -> dict[str, int]:
    aliases = client(settings).get_registered_model("scheduled").aliases
    return {alias: int(version) for alias, version in aliases.items()}
