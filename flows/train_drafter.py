"""The whole chain: chats in, a registered drafter and a page out."""

from datetime import UTC, datetime
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Failed

from configs.settings import Settings
from dflash_core.reporting import RunSummary, StrategyFacts
from dflash_core.throughput import GateResult
from tasks.calibrate import calibrate
from tasks.compare import compare, gate
from tasks.console import announce
from tasks.evaluate import evaluate
from tasks.inspect_target import inspect_target
from tasks.prepare import corpus_facts, prepare_corpus
from tasks.profile import fit_edges, profile_facts, profile_lengths
from tasks.register import register
from tasks.report import environment, training_facts, write_report
from tasks.run_folder import RunFolder, open_run_folder
from tasks.tracking import TrackedRun, open_tracking
from tasks.train import train, training_job

__all__ = ["train_drafter"]


@flow(name="train-drafter", retries=0)
def train_drafter(settings: Settings) -> RunSummary | State[Any]:
    """Profile, compare, gate, train, measure and register.

    Ends in ``Failed(name="Rejected")`` when no strategy passes the gate.
    """
    name = str(flow_run.name or "run")
    target = inspect_target(settings)
    tags = {"prefect.flow_run_id": str(flow_run.id), "prefect.flow_run_name": name}
    with (
        open_run_folder(settings.run, default_name=name) as folder,
        open_tracking(
            settings.tracking, folder, experiment=settings.target.path.name, tags=tags
        ) as run,
    ):
        run.log_params(settings.model_dump(mode="json"))
        summary, drafter = _compare_and_train(settings, folder, run, target)
        page = write_report(summary, folder)
        run.log_files(page)
        run.log_files(folder.path / "summary.json")
        announce(f"report: {page}")
        if drafter is None:
            run.set_tags({"gate": "rejected", "gate.reason": summary.gate.reason})
            return Failed(name="Rejected", message=summary.gate.reason)
        return summary


def _compare_and_train(
    settings: Settings, folder: RunFolder, run: TrackedRun, target: str
) -> tuple[RunSummary, Any]:
    corpus = prepare_corpus(settings, folder)
    profile = profile_lengths(corpus.train, folder)
    fit = fit_edges(settings, profile)
    limit = settings.run.concurrency_limit
    job = training_job(settings, corpus.train, folder)
    cost = calibrate(job, folder, concurrency_limit=limit)
    strategies = compare(settings, corpus.train, cost)
    result = gate(settings, strategies)
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
        return summary, None
    chosen = strategies[result.chosen]
    job = training_job(settings, corpus.train, folder, strategy=chosen.name, mixing=chosen.mixing)
    with run.child("training", {"strategy": chosen.name, "mixing": chosen.mixing}) as training:
        training.log_params(job.model_dump(mode="json"))
        drafter = train(job, training, concurrency_limit=limit)
        facts = training_facts(job, chosen)
        training.log_metrics(
            {
                "ktok_s_measured": facts.measured_ktok_s,
                "ktok_s_predicted": facts.predicted_ktok_s,
                "prediction_error": facts.prediction_error,
            }
        )
        acceptance = evaluate(settings, drafter, corpus.held_out)
        training.log_metrics({"tau": acceptance.tau, "tau_mean": acceptance.overall.tau_mean})
        training.log_json("acceptance.json", acceptance.model_dump(mode="json"))
        version = register(
            settings, folder, drafter, acceptance, training, {"environment": environment()}
        )
    done = {"training": facts, "acceptance": acceptance, "model_version": version}
    return summary.model_copy(update=done), drafter


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
