"""The steps that flows share: from chats to the gate's choice."""

from datetime import UTC, datetime

from configs.settings import Settings
from dflash_core.corpus.build import CorpusReport
from dflash_core.reporting import RunSummary, StrategyFacts
from dflash_core.throughput import GateResult
from tasks.calibrate import calibrate
from tasks.compare import compare, gate
from tasks.pilot import pilot
from tasks.prepare import corpus_facts, prepare_corpus
from tasks.profile import fit_edges, profile_facts, profile_lengths
from tasks.report import environment
from tasks.run_folder import RunFolder
from tasks.tracking import TrackedRun
from tasks.train import training_job

__all__ = ["choose_strategy"]


def choose_strategy(
    settings: Settings, folder: RunFolder, run: TrackedRun, target: str
) -> tuple[RunSummary, CorpusReport]:
    """Prepare, profile, calibrate, compare and judge; every strategy gets a nested run."""
    run.log_params(settings.model_dump(mode="json"))
    corpus = prepare_corpus(settings, folder)
    profile = profile_lengths(corpus.train, folder)
    fit = fit_edges(settings, profile)
    job = training_job(settings, corpus.train, folder)
    cost = calibrate(job, folder, concurrency_limit=settings.run.concurrency_limit)
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
                ),
                num_steps=settings.gate.pilot_steps,
                concurrency_limit=settings.run.concurrency_limit,
            )
            for index in result.pilots
        }
        result = gate(settings, strategies, measured)
    _record(run, strategies, result)
    summary = RunSummary(
        name=folder.name,
        started=f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        target=target,
        hardware=cost.fingerprint.hardware if cost.fingerprint else "unknown",
        environment=environment(),
        corpus=corpus_facts(settings, corpus),
        profile=profile_facts(profile, fit),
        strategies=tuple(strategies),
        gate=result,
    )
    if result.chosen is None:
        run.set_tags({"gate": "rejected", "gate.reason": result.reason})
    return summary, corpus


def _record(run: TrackedRun, strategies: list[StrategyFacts], result: GateResult) -> None:
    """Give every strategy a nested run, the rejected ones with their reason."""
    for index, (facts, verdict) in enumerate(zip(strategies, result.verdicts, strict=True)):
        outcome = "chosen" if index == result.chosen else "passed" if verdict.passed else "rejected"
        tags = {"gate": outcome, "gate.reason": verdict.reason, "mixing": facts.mixing}
        with run.child(f"strategy-{facts.name}-{facts.mixing}", tags) as nested:
            nested.log_params({"strategy": facts.name, "mixing": facts.mixing})
            figures = facts.model_dump(exclude={"name", "mixing", "prediction"})
            predicted = facts.prediction.model_dump(exclude={"bottleneck"})
            nested.log_metrics({**figures, **{f"predicted/{k}": v for k, v in predicted.items()}})
