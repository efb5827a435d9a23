"""prefect.yaml and the image, read as text: what they name exists and means what it says."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.settings import Settings, load_settings

ROOT = Path(__file__).resolve().parent.parent
FLOWS = {"plan_batches", "train_drafter", "retrain", "evaluate_drafter", "calibrate"}


def deployments() -> list[dict[str, Any]]:
    return yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]


def test_every_flow_has_a_deployment() -> None:
    assert {entry["entrypoint"].split(":")[1] for entry in deployments()} == FLOWS


@pytest.mark.parametrize("entry", deployments(), ids=lambda e: f"{e['entrypoint']}-{e['name']}")
def test_entry_points_take_the_parameters_they_are_given(entry: dict[str, Any]) -> None:
    file, name = entry["entrypoint"].split(":")
    if not (ROOT / file).is_file():
        pytest.skip(f"{file} is not written yet")
    tree = ast.parse((ROOT / file).read_text())
    flow = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    taken = {argument.arg for argument in (*flow.args.args, *flow.args.kwonlyargs)}
    assert set(entry["parameters"]) <= taken
    assert "annotations" not in (ROOT / file).read_text()  # they break models as parameters


@pytest.mark.parametrize("entry", deployments(), ids=lambda entry: entry["name"])
def test_deployed_settings_are_those_of_a_settings_file(entry: dict[str, Any]) -> None:
    file = ROOT / "configs" / f"{entry['name'].replace('weekly', 'demo')}.toml"
    named = load_settings(file).model_dump(exclude={"run": True, "target": {"path"}})
    deployed = Settings.model_validate(entry["parameters"]["settings"])
    assert deployed.model_dump(exclude={"run": True, "target": {"path"}}) == named
    assert deployed.run.concurrency_limit == "gpu-pool"


def test_retraining_is_scheduled_but_asleep() -> None:
    schedules = [s for entry in deployments() for s in entry.get("schedules", [])]
    assert [(s["timezone"], s["active"]) for s in schedules] == [("UTC", False)]


def test_image_runs_as_nobody_in_particular_under_an_init() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert re.findall(r"^USER (.*)", text, re.M) == ["10001"]
    assert 'ENTRYPOINT ["/usr/bin/tini", "-g", "--"]' in text
    assert "HEALTHCHECK" in text


def test_image_copies_only_what_its_context_holds() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    copied = re.findall(
        r"^COPY (?!--from)(?:--chown=\S+ )?(.*) \S+$", (ROOT / "Dockerfile").read_text(), re.M
    )
    assert {name for line in copied for name in line.split()} <= allowed
