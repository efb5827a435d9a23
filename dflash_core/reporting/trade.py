"""The trade of batching as a picture: padding efficiency against diversity."""

from collections.abc import Sequence
from pathlib import Path

from dflash_core.planning import StrategyReport

__all__ = ["draw_trade"]

MARKERS = {"diverse": "o", "synchronised": "s", "random": "^"}
LEAST_SHARE = 1e-6


def draw_trade(reports: Sequence[StrategyReport], path: Path) -> None:
    """Write a PNG with one point per strategy and mixing.

    Left: how alike the samples of a micro-batch are. Right: how alike those of an optimizer step.
    Down is more diverse, right is less padding.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    names = list(dict.fromkeys(report.name for report in reports))
    measures = {"length_eta2": "micro-batches", "step_length_eta2": "optimizer steps"}
    for axes, (measure, group) in zip(figure.subplots(1, 2), measures.items(), strict=True):
        for report in reports:
            share = max(getattr(report, measure), LEAST_SHARE)
            axes.plot(
                report.padding_efficiency,
                share,
                MARKERS[report.mixing],
                color=f"C{names.index(report.name)}",
                label=f"{report.name}, {report.mixing}",
            )
        axes.set_xlabel("padding efficiency (real tokens / token slots)")
        axes.set_ylabel("length_eta2, logarithmic")
        axes.set_title(f"share of length variance between {group}")
        axes.set_yscale("log")
        axes.grid(visible=True, alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    canvas.print_figure(path, dpi=120)
