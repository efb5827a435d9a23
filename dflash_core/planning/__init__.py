"""Who runs together, when, and where? Strategies turn lengths into an epoch plan."""

from dflash_core.planning.anchors import AnchorConfig, num_anchors
from dflash_core.planning.compare import (
    StrategyReport,
    compare_strategies,
    comparison_json,
)
from dflash_core.planning.config import BatchingConfig
from dflash_core.planning.cost import PlanCost
from dflash_core.planning.diversity import DiversityReport, Spread, diversity_of
from dflash_core.planning.epoch_plan import EpochPlan
from dflash_core.planning.identity import PLANNER_VERSION, PlanIdentity, changed_ingredients
from dflash_core.planning.other_ranks import relayout
from dflash_core.planning.plan import plan_epoch
from dflash_core.planning.strategies import STRATEGIES

__all__ = [
    "PLANNER_VERSION",
    "STRATEGIES",
    "AnchorConfig",
    "BatchingConfig",
    "DiversityReport",
    "EpochPlan",
    "PlanCost",
    "PlanIdentity",
    "Spread",
    "StrategyReport",
    "changed_ingredients",
    "compare_strategies",
    "comparison_json",
    "diversity_of",
    "num_anchors",
    "plan_epoch",
    "relayout",
]
