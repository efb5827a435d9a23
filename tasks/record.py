"""The comparison of strategies as MLflow keeps it: a nested run each, data, figures, a table."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from dflash_core.corpus.build import CorpusReport
from dflash_core.corpus.store import TokenStore
from dflash_core.profiling import LengthProfile
from dflash_core.reporting import RunSummary, length_figure, strategy_figure, strategy_table
from tasks.tracking.run import TrackedRun

__all__ = ["record_comparison"]

WORDS = {"name", "mixing", "plan_hash", "prediction"}


@task(name="record-comparison", cache_policy=NO_CACHE)
def record_comparison(
    run: TrackedRun, summary: RunSummary, corpus: CorpusReport, profile: LengthProfile
) -> None:
    """Record the data and every strategy, the rejected ones with their reason."""
    run.log_dataset(
        corpus.train.name,
        digest=TokenStore.open(corpus.train).content_hash,
        source=str(corpus.train),
        profile=profile.summary(),
    )
    run.log_figure("lengths.svg", length_figure(summary.profile))
    run.log_figure("strategies.svg", strategy_figure(summary.strategies))
    run.log_table("strategies.json", strategy_table(summary).columns)
    gate = summary.gate
    for index, (facts, verdict) in enumerate(zip(summary.strategies, gate.verdicts, strict=True)):
        outcome = "chosen" if index == gate.chosen else "passed" if verdict.passed else "rejected"
        tags = {"gate": outcome, "gate.reason": verdict.reason, "mixing": facts.mixing}
        with run.child(f"strategy-{facts.name}-{facts.mixing}", tags) as nested:
            words = {"strategy": facts.name, "mixing": facts.mixing, "plan": facts.plan_hash}
            nested.log_params(words)
            predicted = facts.prediction.model_dump(exclude={"bottleneck", "first", "later"})
            figures = facts.model_dump(exclude=WORDS)
            nested.log_metrics({**figures, **{f"predicted/{k}": v for k, v in predicted.items()}})
    if gate.chosen is None:
        run.set_tags({"gate": "rejected", "gate.reason": gate.reason})
