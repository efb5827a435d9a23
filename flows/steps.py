"""The steps that flows share: from chats to the gate's choice."""

from datetime import UTC, datetime

from configs.settings import Settings
from dflash_core.corpus.build import CorpusReport
from dflash_core.reporting import RunSummary
from dflash_core.throughput import CostModel
from tasks.calibrate import calibrate
from tasks.compare import compare, gate
from tasks.pilot import pilot
from tasks.prepare import corpus_facts, prepare_corpus
from tasks.profile import fit_edges, profile_facts, profile_lengths
from tasks.record import record_comparison
from tasks.report import environment
from tasks.run_folder import RunFolder
from tasks.tracking import TrackedRun
from tasks.train import training_job

__all__ = ["choose_strategy"]


def choose_strategy(
    settings: Settings, folder: RunFolder, run: TrackedRun, target: str
) -> tuple[RunSummary, CorpusReport, CostModel]:
    """Prepare, profile, calibrate, compare and judge; every strategy gets a nested run."""
    run.log_params(settings.model_dump(mode="json"))
    corpus = prepare_corpus(settings, folder)
    profile = profile_lengths(corpus.train, folder, dask=settings.run.dask)
    edges = fit_edges(settings, profile)
    job = training_job(settings, corpus.train, folder)
    cost = calibrate(job, folder, given=settings.run.calibration)
    strategies = compare(settings, corpus.train, cost)
    result = gate(settings, strategies)
    if result.pilots:
        measured = {
            index: pilot(
                training_job(
                    settings,
                    corpus.train,
                    folder,
                    strategy=strategies[index].name,
                    mixing=strategies[index].mixing,
                    cost=cost,
                ),
                folder,
                num_steps=settings.gate.pilot_steps,
            )
            for index in result.pilots
        }
        result = gate(settings, strategies, measured)
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
    return summary, corpus, cost
