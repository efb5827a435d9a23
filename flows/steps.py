"""The steps that flows share: from chats to the gate's choice."""

from datetime import UTC, datetime
from typing import Any

from prefect import State
from prefect.states import Failed

from configs.settings import Settings
from dflash_core.calibration.history import Calibration
from dflash_core.corpus.build import CorpusReport
from dflash_core.errors import DFlashError
from dflash_core.reporting import RunSummary
from dflash_core.throughput import keep_begun
from tasks.calibrate import calibrate
from tasks.compare import compare, gate
from tasks.console import announce
from tasks.pilot import pilot
from tasks.places.run_folder import RunFolder
from tasks.prepare import corpus_facts, prepare_corpus
from tasks.profile import fit_edges, profile_facts, profile_lengths
from tasks.record import record_comparison
from tasks.report import environment
from tasks.tracking.run import TrackedRun
from tasks.train import begun_with, check_settings, training_job

__all__ = ["Rejection", "choose_strategy", "rejected"]


class Rejection(DFlashError):
    """No strategy passed the gate; what a rejected run gives in place of a result."""

    exit_code = 3
    summary: RunSummary | None = None


def rejected(summary: RunSummary) -> State[Any]:
    """Return the state in which a rejected run ends: failed by type, rejected by name."""
    found = Rejection(summary.gate.reason)
    found.summary = summary
    return Failed(name="Rejected", message=summary.gate.reason, data=found)


def choose_strategy(
    settings: Settings, folder: RunFolder, run: TrackedRun, target: str
) -> tuple[RunSummary, CorpusReport, Calibration]:
    """Prepare, profile, calibrate, compare and judge; every strategy gets a nested run."""
    run.log_params(settings.model_dump(mode="json"))
    check_settings(settings, folder)
    corpus = prepare_corpus(settings, folder)
    profile = profile_lengths(corpus.train, folder, dask=settings.run.dask)
    edges = fit_edges(settings, profile)
    job = training_job(settings, corpus, folder)
    calibration = calibrate(job, folder, given=settings.run.calibration)
    cost = calibration.cost
    strategies = compare(settings, corpus.train, cost)
    result = gate(settings, strategies)
    measured: dict[int, float] = {}
    while result.pilots:
        for index in result.pilots:
            facts = strategies[index]
            short = training_job(
                settings,
                corpus,
                folder,
                strategy=facts.name,
                mixing=facts.mixing,
                cost=cost,
            )
            measured[index] = pilot(short, folder, num_steps=settings.gate.pilot_steps)
        result = gate(settings, strategies, measured)
    if (begun := begun_with(settings, folder)) is not None:
        result = keep_begun(result, name=begun.strategy, mixing=begun.mixing)
        announce(f"gate: {result.reason}")
    summary = RunSummary(
        name=folder.name,
        started=f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        target=target,
        hardware=cost.fingerprint.hardware if cost.fingerprint else "unknown",
        environment=environment(),
        corpus=corpus_facts(settings, corpus),
        profile=profile_facts(profile, edges),
        strategies=tuple(strategies),
        gate=result,
    )
    record_comparison(run, summary, corpus, profile)
    return summary, corpus, calibration
