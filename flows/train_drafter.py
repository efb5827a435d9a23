"""The whole chain: chats in, a registered drafter and a page out."""

from typing import Any

from prefect import State, flow
from prefect.runtime import flow_run

from configs.settings import Settings
from dflash_core.calibration.history import Calibration
from dflash_core.config import changed
from dflash_core.corpus.build import CorpusReport
from dflash_core.reporting import RunSummary
from flows.steps import choose_strategy, rejected
from tasks.accuracy import hold_run
from tasks.console import announce
from tasks.evaluate import evaluate
from tasks.inspect_target import inspect_target
from tasks.places.run_folder import RunFolder, open_run_folder
from tasks.profile import profile_lengths
from tasks.register import register
from tasks.report import training_facts, write_report
from tasks.tracking.run import TrackedRun, open_tracking
from tasks.train import train, training_job

__all__ = ["train_drafter"]


@flow(name="train-drafter", retries=0)
def train_drafter(settings: Settings) -> RunSummary | State[Any]:
    """Profile, compare, gate, train, measure and register.

    Ends in ``Failed(name="Rejected")`` when no strategy passes the gate.
    """
    target = inspect_target(settings)
    name = str(flow_run.name or "run")
    with (
        open_run_folder(settings.run, default_name=name) as folder,
        open_tracking(settings, folder) as run,
    ):
        summary, corpus, calibration = choose_strategy(settings, folder, run, target)
        if summary.gate.chosen is not None:
            summary = _train(settings, folder, run, summary, corpus, calibration)
        page = write_report(summary, folder)
        run.log_files(page)
        run.log_files(folder.path / "summary.json")
        announce(f"report: {page}")
    if summary.gate.chosen is None:
        return rejected(summary)
    return summary


def _train(
    settings: Settings,
    folder: RunFolder,
    run: TrackedRun,
    summary: RunSummary,
    corpus: CorpusReport,
    calibration: Calibration,
) -> RunSummary:
    """Train the chosen strategy, measure the drafter, register it."""
    assert summary.gate.chosen is not None
    chosen = summary.strategies[summary.gate.chosen]
    job = training_job(
        settings,
        corpus,
        folder,
        strategy=chosen.name,
        mixing=chosen.mixing,
        cost=calibration.cost,
    )
    with run.child("training", {"strategy": chosen.name, "mixing": chosen.mixing}) as training:
        training.log_params(job.model_dump(mode="json"))
        drafter = train(job, folder, training)
        accuracy = hold_run(job, chosen, calibration, training)
        facts = training_facts(job, chosen, accuracy)
        training.log_metrics(
            {
                "ktok_s_measured": facts.measured_ktok_s,
                "ktok_s_predicted": facts.predicted_ktok_s,
                "prediction_error": facts.prediction_error,
            }
        )
        acceptance = evaluate(settings, drafter, corpus.held_out)
        training.log_metrics(acceptance.metrics)
        training.log_json("acceptance.json", acceptance.model_dump(mode="json"))
        profile = profile_lengths(corpus.train, folder)
        version = register(settings, folder, drafter, acceptance, training, corpus.train, profile)
    done = {"training": facts, "acceptance": acceptance, "model_version": version}
    return changed(summary, done)
