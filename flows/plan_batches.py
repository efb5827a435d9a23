"""Profile, fit, compare and judge; train nothing."""

from typing import Any

from prefect import State, flow
from prefect.runtime import flow_run

from configs.settings import Settings
from dflash_core.reporting import RunSummary
from flows.steps import choose_strategy, rejected
from tasks.inspect_target import inspect_target
from tasks.places.run_folder import open_run_folder
from tasks.report import write_report
from tasks.tracking.run import open_tracking

__all__ = ["plan_batches"]


@flow(name="plan-batches", retries=0)
def plan_batches(settings: Settings) -> RunSummary | State[Any]:
    """Say which strategy would be trained, and why.

    Ends in ``Failed(name="Rejected")`` when no strategy passes the gate.
    """
    target = inspect_target(settings)
    name = str(flow_run.name or "plan")
    with (
        open_run_folder(settings.run, default_name=name) as folder,
        open_tracking(settings, folder) as run,
    ):
        summary, *_ = choose_strategy(settings, folder, run, target)
        run.log_files(write_report(summary, folder))
    if summary.gate.chosen is None:
        return rejected(summary)
    return summary
