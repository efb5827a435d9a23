"""Figures of a run, as inline SVG that follows the reader's colour scheme."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from dflash_core.decoding.report import AcceptanceReport
from dflash_core.reporting.summary import ProfileFacts, StrategyFacts, TrainingFacts

__all__ = [
    "acceptance_figure",
    "length_figure",
    "strategy_figure",
    "svg",
    "throughput_figure",
    "training_figure",
]

# Colour-blind safe (Okabe and Ito), readable on white and on near-black.
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#888888"
NUM_BINS = 60


def svg(figure: Figure) -> str:
    """Return a figure as an SVG element whose lines and text take the page's colour."""
    stream = io.StringIO()
    FigureCanvasSVG(figure).print_svg(stream, metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    return text[text.index("<svg") :].replace("#000000", "currentColor")


def length_figure(profile: ProfileFacts) -> Figure:
    """Draw the length histogram with the bucket edges."""
    figure, axes = _axes("tokens in a sample", "samples")
    lengths = np.repeat(profile.lengths, profile.counts)
    axes.hist(lengths, bins=min(NUM_BINS, len(profile.lengths)), color=BLUE)
    for edge in profile.edges:
        axes.axvline(edge, color=ORANGE, linewidth=0.8)
    axes.set_title(f"{profile.num_samples:,} samples; lines are bucket edges")
    return figure


def strategy_figure(strategies: Sequence[StrategyFacts]) -> Figure:
    """Draw padding efficiency against how alike the lengths of a step are."""
    figure, axes = _axes(
        "step length eta2 (0: every step holds the whole mix)", "padding efficiency"
    )
    for strategy in strategies:
        axes.scatter(strategy.step_length_eta2, strategy.padding_efficiency, color=BLUE)
        axes.annotate(
            f"{strategy.name}/{strategy.mixing}",
            (strategy.step_length_eta2, strategy.padding_efficiency),
            textcoords="offset points",
            xytext=(6, 3),
            fontsize=8,
        )
    axes.margins(x=0.3, y=0.15)
    return figure


def throughput_figure(
    strategies: Sequence[StrategyFacts], training: TrainingFacts | None
) -> Figure:
    """Draw predicted throughput with its interval, and what was measured."""
    figure, axes = _axes("", "Ktok/s (real tokens)")
    names = [f"{s.name}\n{s.mixing}" for s in strategies]
    predicted = np.array([s.prediction.ktok_s for s in strategies])
    low = predicted - [s.prediction.low for s in strategies]
    high = np.array([s.prediction.high for s in strategies]) - predicted
    axes.bar(names, predicted, yerr=[low, high], color=BLUE, capsize=4, ecolor=GREY)
    if training is not None:
        index = [f"{s.name}/{s.mixing}" for s in strategies].index(training.strategy)
        axes.scatter([index], [training.measured_ktok_s], color=ORANGE, zorder=3, label="measured")
        axes.legend(frameon=False)  # a frame would be white on a dark page
    return figure


def training_figure(training: TrainingFacts) -> Figure:
    """Draw the loss, with its running mean, and the acceptance at the anchors drawn."""
    figure, axes = _axes("step", "loss")
    steps = np.arange(1, len(training.losses) + 1)
    axes.plot(steps, training.losses, color=BLUE, alpha=0.25, linewidth=0.8)
    axes.plot(steps, _smooth(training.losses), color=BLUE, label="loss")
    other = axes.twinx()
    other.plot(steps, _smooth(training.acceptances), color=ORANGE, label="at drawn anchors")
    other.set_ylabel("acceptance at drawn anchors")
    figure.legend(loc="upper center", ncols=2, frameon=False)
    return figure


def acceptance_figure(acceptance: AcceptanceReport) -> Figure:
    """Draw how many tokens each verification committed."""
    figure, axes = _axes("tokens committed by a verification", "share of verifications")
    counts = np.array(acceptance.histogram, dtype=float)
    axes.bar(np.arange(1, len(counts) + 1), counts / max(counts.sum(), 1), color=GREEN)
    axes.set_title(f"acceptance length {acceptance.tau:.2f}, pooled")
    return figure


def _axes(x: str, y: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _smooth(values: Sequence[float]) -> "np.ndarray[Any, Any]":
    width = max(len(values) // 30, 1)
    padded = np.pad(np.asarray(values, dtype=float), (width - 1, 0), mode="edge")
    return np.convolve(padded, np.ones(width) / width, mode="valid")
