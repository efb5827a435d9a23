"""What happened? Figures and the page."""

from dflash_core.reporting.bars import length_bars
from dflash_core.reporting.figures import length_figure, strategy_figure
from dflash_core.reporting.page import render_page
from dflash_core.reporting.summary import (
    CorpusFacts,
    ProfileFacts,
    RunSummary,
    StrategyFacts,
    TrainingFacts,
)
from dflash_core.reporting.tables import (
    Table,
    acceptance_table,
    accuracy_table,
    headline,
    markdown,
    speed_table,
    strategy_table,
)

__all__ = [
    "CorpusFacts",
    "ProfileFacts",
    "RunSummary",
    "StrategyFacts",
    "Table",
    "TrainingFacts",
    "acceptance_table",
    "accuracy_table",
    "headline",
    "length_bars",
    "length_figure",
    "markdown",
    "render_page",
    "speed_table",
    "strategy_figure",
    "strategy_table",
]
