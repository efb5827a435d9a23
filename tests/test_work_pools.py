"""Templates of work pools: what they ask of an operator is declared, and what runs is ours."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
TEMPLATES = sorted((ROOT / "configs" / "work_pools").glob("*.json"))


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


@pytest.mark.parametrize("file", TEMPLATES, ids=lambda file: file.stem)
def test_every_place_to_fill_is_declared_and_every_declaration_is_used(file: Path) -> None:
    template = read(file)
    used = set(re.findall(r"{{ (\w+) }}", json.dumps(template["job_configuration"])))
    assert used == set(template["variables"]["properties"])


@pytest.mark.parametrize("file", TEMPLATES, ids=lambda file: file.stem)
def test_jobs_send_heartbeats_and_keep_results_as_json(file: Path) -> None:
    variables = read(file)["variables"]["properties"]["env"]["default"]
    process = yaml.safe_load((ROOT / "prefect.yaml").read_text())["definitions"]["pool"]
    for name in ("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", "PREFECT_RESULTS_DEFAULT_SERIALIZER"):
        assert variables[name] == process["job_variables"]["env"][name]


def test_pods_of_one_run_meet_share_runs_and_get_time_to_save() -> None:
    job = read(ROOT / "configs" / "work_pools" / "kubernetes.json")
    spec = job["job_configuration"]["job_manifest"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == "{{ nodes }}"
    assert spec["template"]["metadata"]["labels"] == {"app": "dflash"}
    pod = spec["template"]["spec"]
    assert pod["subdomain"] and pod["terminationGracePeriodSeconds"] > 30
    (container,) = pod["containers"]
    assert container["args"] == ["dflash-flow", "join", "--root", "/app/runs"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "{{ gpus_per_node }}"
    assert [mount["name"] for mount in container["volumeMounts"]] == ["runs", "shm"]
    assert container["volumeMounts"][0]["mountPath"] == "/app/runs"
    assert "VOLUME /app/runs" in (ROOT / "Dockerfile").read_text()
