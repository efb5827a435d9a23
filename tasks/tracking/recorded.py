"""Runs that MLflow knows, as values to list and compare."""

import math
from collections.abc import Mapping
from datetime import UTC, datetime

from mlflow import MlflowClient
from mlflow.entities import Run

from dflash_core.config import FrozenModel
from dflash_core.errors import DataError

__all__ = ["RecordedRun", "differing", "find_runs", "recorded_runs"]

PARENT_TAG = "mlflow.parentRunId"
TRAINING = "training"


class RecordedRun(FrozenModel):
    """A flow run with what its training found."""

    name: str
    """Name of the run, also of its folder."""
    run_id: str
    """MLflow's id."""
    experiment: str
    """Experiment, named after the target."""
    flow: str
    """The flow that ran."""
    status: str
    """As MLflow has it; 'REJECTED' when the gate rejected everything."""
    started: str
    """When, UTC."""
    strategy: str = ""
    """Strategy and mixing that were trained."""
    rejected: tuple[str, ...] = ()
    """Strategies that the gate rejected."""
    params: dict[str, str]
    """Settings of the run."""
    metrics: dict[str, float]
    """Last figures of the run and of its training, those that are finite."""


def recorded_runs(client: MlflowClient, *, limit: int) -> list[RecordedRun]:
    """Return the newest flow runs, newest first.

    Args:
        client: Where MLflow is.
        limit: Most runs to return.
    """
    experiments = {e.experiment_id: e.name for e in client.search_experiments()}
    if not experiments:
        return []
    found = client.search_runs(
        list(experiments),
        "attributes.run_name != '' AND tags.`prefect.flow_run_name` != ''",
        max_results=limit,
        order_by=["attributes.start_time DESC"],
    )
    return [_recorded(client, run, experiments[run.info.experiment_id]) for run in found]


def find_runs(runs: list[RecordedRun], names: list[str]) -> list[RecordedRun]:
    """Return the newest run of each name.

    Raises:
        DataError: There is no run of a name.
    """
    by_name = {run.name: run for run in reversed(runs)}
    for name in names:
        if name not in by_name:
            known = ", ".join(list(by_name)[-5:]) or "none"
            raise DataError(f"MLflow knows no run '{name}'; the newest are {known}")
    return [by_name[name] for name in names]


def differing(runs: list[RecordedRun]) -> Mapping[str, list[str]]:
    """Return the settings in which runs differ, with each run's value."""
    names = sorted({name for run in runs for name in run.params})
    rows = {name: [run.params.get(name, "") for run in runs] for name in names}
    return {name: row for name, row in rows.items() if len(set(row)) > 1}


def _recorded(client: MlflowClient, run: Run, experiment: str) -> RecordedRun:
    children = client.search_runs(
        [run.info.experiment_id], f"tags.`{PARENT_TAG}` = '{run.info.run_id}'"
    )
    training = next((c for c in children if c.info.run_name == TRAINING), None)
    rejected = [c for c in children if c.data.tags.get("gate") == "rejected"]
    tags = run.data.tags
    strategy, metrics = "", dict(run.data.metrics)
    if training is not None:
        strategy = f"{training.data.tags.get('strategy')}/{training.data.tags.get('mixing')}"
        metrics |= training.data.metrics
    return RecordedRun(
        name=str(run.info.run_name),
        run_id=run.info.run_id,
        experiment=experiment,
        flow=tags.get("prefect.flow_name", ""),
        status="REJECTED" if tags.get("gate") == "rejected" else run.info.status,
        started=f"{datetime.fromtimestamp(run.info.start_time / 1000, UTC):%Y-%m-%d %H:%M}",
        strategy=strategy,
        rejected=tuple(sorted(str(c.info.run_name) for c in rejected)),
        params=dict(run.data.params),
        # MLflow keeps whatever anybody logs.
        metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
    )
