"""Strategies side by side: plans, diversity, predicted throughput, and the gate's word."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from configs.settings import Settings
from dflash_core.corpus.store import TokenStore
from dflash_core.planning import StrategyReport, compare_strategies
from dflash_core.reporting import StrategyFacts
from dflash_core.throughput import Candidate, CostModel, GateResult, judge, predict
from tasks.console import announce

__all__ = ["compare", "gate"]

SHARED = ("name", "mixing", "padding_efficiency", "length_eta2", "step_length_eta2")
SHARED_TOO = ("pair_recurrence", "straggler_factor")


@task(name="compare-strategies", cache_policy=NO_CACHE)
def compare(settings: Settings, store: Path, cost: CostModel) -> list[StrategyFacts]:
    """Plan each strategy and predict its throughput."""
    opened = TokenStore.open(store)
    reports = compare_strategies(
        opened.lengths,
        settings.batching,
        strategies=settings.compare.strategies,
        mixings=settings.compare.mixings,
        seed=settings.training.seed,
        world_size=settings.training.topology.num_consumers,
        supervised=opened.supervised,
        cost=cost.plan_cost(
            settings.training.topology.kind,
            block_size=settings.draft.block_size,
            lengths=opened.lengths,
        ),
    )
    return [_facts(report, cost, settings) for report in reports]


@task(name="gate", cache_policy=NO_CACHE)
def gate(
    settings: Settings, strategies: list[StrategyFacts], pilots: dict[int, float] | None = None
) -> GateResult:
    """Hold the strategies against the thresholds; Ktok/s of pilots count instead of predictions."""
    pilots = pilots or {}
    candidates = [
        Candidate(
            **{name: getattr(facts, name) for name in (*SHARED, *SHARED_TOO)},
            prediction=facts.prediction,
            measured_ktok_s=facts.prediction.run_ktok_s(pilots[index]) if index in pilots else None,
        )
        for index, facts in enumerate(strategies)
    ]
    result = judge(candidates, settings.gate)
    for verdict in result.verdicts:
        announce(f"  {verdict.reason}")
    announce(f"gate: {result.reason}")
    return result


def _facts(report: StrategyReport, cost: CostModel, settings: Settings) -> StrategyFacts:
    return StrategyFacts(
        **{name: getattr(report, name) for name in (*SHARED, *SHARED_TOO)},
        num_micro_batches=report.num_micro_batches,
        num_steps=report.num_steps,
        plan_hash=report.plan.content_hash,
        prediction=predict(
            report.plan,
            cost,
            block_size=settings.draft.block_size,
            topology=settings.training.topology,
            epochs=settings.training.epochs,
            max_steps=settings.training.max_steps,
            features=settings.training.features,
        ),
    )
