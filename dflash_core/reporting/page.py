"""The report: one self-contained HTML file, readable in light and dark, without scripts."""

from html import escape

from matplotlib.figure import Figure

from dflash_core.reporting.figures import (
    acceptance_figure,
    length_figure,
    strategy_figure,
    svg,
    throughput_figure,
    training_figure,
)
from dflash_core.reporting.summary import RunSummary
from dflash_core.reporting.tables import (
    Table,
    acceptance_table,
    accuracy_table,
    headline,
    speed_table,
    strategy_table,
)

__all__ = ["render_page"]

STYLE = """
:root { color-scheme: light dark; --line: color-mix(in srgb, currentColor 18%, transparent); }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); }
.scroll { overflow-x: auto; } .quiet { opacity: .75; font-size: .9rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; } dd { margin: 0; }
dt { font-weight: 600; } figure { margin: 1rem 0; }
svg { fill: currentColor; max-width: 100%; height: auto; }
figcaption { font-size: .86rem; opacity: .8; } .two { display: flex; flex-wrap: wrap; gap: 1rem; }
.two figure { flex: 1 1 26rem; } li { margin: .2rem 0; }
"""


def render_page(summary: RunSummary) -> str:
    """Return the whole page.

    Args:
        summary: The run; parts that did not happen are left out.
    """
    parts = [
        f"<h1>{escape(summary.name)}</h1>",
        f'<p class="quiet">{escape(summary.started)} UTC, {escape(summary.hardware)}, '
        f"target {escape(summary.target)}</p>",
        _facts(headline(summary)),
        "<h2>Gate</h2>",
        f"<p>{escape(summary.gate.reason)}.</p>",
        _list([verdict.reason for verdict in summary.gate.verdicts]),
        "<h2>Strategies</h2>",
        _table(strategy_table(summary)),
        '<div class="two">',
        _figure(
            strategy_figure(summary.strategies),
            "Up is less padding, left is more diverse optimizer steps.",
        ),
        _figure(
            throughput_figure(summary.strategies, summary.training),
            "Predicted throughput with its interval; the dot was measured in training.",
        ),
        "</div>",
        "<h2>Sequence lengths</h2>",
        _lengths(summary),
    ]
    if summary.training is not None:
        parts += [
            "<h2>Training</h2>",
            _table(accuracy_table(summary.training.accuracy)) if summary.training.accuracy else "",
            _figure(
                training_figure(summary.training),
                "Loss and the acceptance length that teacher forcing promises, smoothed.",
            ),
        ]
    if summary.acceptance is not None:
        parts += [
            "<h2>Acceptance by real speculative decoding</h2>",
            _table(acceptance_table(summary.acceptance)),
            _table(speed_table(summary.acceptance)),
            _figure(
                acceptance_figure(summary.acceptance),
                "Tokens committed per target forward, the bonus token included.",
            ),
        ]
    parts += ["<h2>Environment</h2>", _facts(list(summary.environment.items()))]
    title = escape(f"{summary.name} - DFlash run")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head><body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _lengths(summary: RunSummary) -> str:
    profile = summary.profile
    facts = [
        ("samples", f"{profile.num_samples:,}"),
        ("tokens", f"{profile.total_tokens:,}"),
        ("supervised", f"{profile.total_supervised / max(profile.total_tokens, 1):.0%}"),
        *((name, f"{value:,.0f}") for name, value in profile.quantiles.items()),
        ("bucket edges", ", ".join(f"{edge:,}" for edge in profile.edges)),
    ]
    if profile.spike:
        facts.append(("truncation spike", profile.spike))
    caption = "Heavy-tailed lengths are what makes batching a trade."
    return _facts(facts) + _figure(length_figure(profile), caption)


def _facts(facts: list[tuple[str, str]]) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    return f"<dl>{rows}</dl>"


def _list(items: list[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in table.headings)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows
    )
    inside = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{inside}</div>'


def _figure(figure: Figure, caption: str) -> str:
    text = escape(caption)
    inside = f"{svg(figure)}<figcaption>{text}</figcaption>"
    return f'<figure role="img" aria-label="{text}">{inside}</figure>'
