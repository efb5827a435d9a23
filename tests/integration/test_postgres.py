"""Prefect and MLflow on PostgreSQL: the same flow, an outage, and a password that stays hidden."""

import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from mlflow import MlflowClient

from configs.settings import Settings
from tests.flows.conftest import MakeSettings
from tests.integration.places import (
    Place,
    answers,
    end,
    free_port,
    listening_on,
    open_place,
    paused,
    steps_done,
    wait_for,
)
from tests.integration.postgres import Postgres, open_postgres

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

OUTAGE_S = 60


@dataclass
class Team:
    """PostgreSQL, MLflow on it, and a place whose Prefect is on it too."""

    postgres: Postgres
    place: Place
    uri: str
    mlflow: "subprocess.Popen[bytes] | None" = None

    def start_mlflow(self) -> None:
        port = self.uri.rsplit(":", 1)[1]
        self.mlflow = self.place.start(
            *("mlflow", "mlflow", "server", "--host", "127.0.0.1", "--port", port),
            *("--artifacts-destination", str(self.place.folder / "artifacts")),
            # An address on the command line would show its password to everyone on the machine.
            MLFLOW_BACKEND_STORE_URI=self.postgres.address("mlflow", driver="postgresql+psycopg"),
        )

    def wait_for_mlflow(self) -> None:
        wait_for(lambda: answers(f"{self.uri}/health"), what="MLflow")


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    pytest.importorskip("psycopg", reason="pip install 'dflash-flows[postgres]'")
    folder = tmp_path_factory.mktemp("team")
    uri = f"http://127.0.0.1:{free_port()}"
    with (
        open_postgres() as postgres,
        open_place(
            folder,
            MLFLOW_TRACKING_URI=uri,
            PREFECT_API_DATABASE_CONNECTION_URL=postgres.address(
                "prefect", driver="postgresql+asyncpg"
            ),
        ) as place,
    ):
        found = Team(postgres, place, uri)
        found.start_mlflow()
        place.start_server()
        found.wait_for_mlflow()
        place.set_up()
        del place.env["PREFECT_API_DATABASE_CONNECTION_URL"]  # workers know nothing of it
        place.start_worker()
        yield found


def settings_named(tiny_settings: MakeSettings, name: str, root: Path, **training: object):
    return tiny_settings(
        run={"name": name, "root": root, "concurrency_limit": "gpu-pool"},
        compare={"strategies": ["bucketed"]},
        tracking={"experiment": name},
        training={"topology": {"num_ranks": 1}, "checkpoint_every_steps": 50, **training},
    )


def test_the_same_flow_with_everything_on_postgres(team: Team, tiny_settings: MakeSettings) -> None:
    settings = settings_named(tiny_settings, "team", team.place.folder / "runs")
    team.place.run("train-drafter/tiny", settings, "team", "--watch")
    assert steps_in_mlflow(team, settings) == all_steps(settings)
    client = MlflowClient(team.uri)
    version = client.get_model_version_by_alias("dflash-drafter", "challenger")
    files = {file.path for file in client.list_artifacts(str(version.run_id), "drafter")}
    assert {"drafter/config.json", "drafter/model.safetensors"} <= files
    assert team.mlflow is not None
    assert listening_on(team.mlflow) == {"127.0.0.1"}


def test_an_mlflow_away_for_a_minute_of_training_misses_nothing(
    team: Team, tiny_settings: MakeSettings
) -> None:
    settings = settings_named(tiny_settings, "outage", team.place.folder / "runs", epochs=60)
    team.place.run("train-drafter/tiny", settings, "outage")
    wait_for(lambda: steps_done(training(settings)) >= 6, what="six steps")
    assert team.mlflow is not None
    with paused(training(settings)):
        end(team.mlflow)
    assert team.place.state("outage") == "Running"
    time.sleep(OUTAGE_S)
    assert team.place.state("outage") == "Running"
    team.start_mlflow()
    team.wait_for_mlflow()
    wait_for(lambda: team.place.state("outage") == "Completed", what="the end of the run")
    assert steps_in_mlflow(team, settings) == all_steps(settings)
    assert f"MLflow at {team.uri} does not answer" in team.place.logs("outage")


def test_the_password_is_in_no_file_log_or_row(team: Team) -> None:
    """What was recorded by then: run folders, journals, logs of all processes, both databases."""
    secret = team.postgres.password.encode()
    files = [file for top in (team.place.folder, team.postgres.folder) for file in top.rglob("*")]
    searched = [file for file in files if file.is_file()]
    assert len(searched) > 1000
    assert [file for file in searched if secret in file.read_bytes()] == []


def training(settings: Settings) -> Path:
    assert settings.run.name is not None
    return settings.run.root / settings.run.name / "training"


def all_steps(settings: Settings) -> list[int]:
    return list(range(1, steps_done(training(settings)) + 1))


def steps_in_mlflow(team: Team, settings: Settings) -> list[int]:
    """Return the steps of the one training of an experiment, as often as MLflow has them."""
    client = MlflowClient(team.uri)
    experiment = client.get_experiment_by_name(str(settings.tracking.experiment))
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert {run.info.status for run in runs} == {"FINISHED"}
    (found,) = (run for run in runs if run.info.run_name == "training")
    history = client.get_metric_history(found.info.run_id, "loss")
    return sorted(point.step for point in history)
