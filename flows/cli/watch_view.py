"""What ``dflash-flow watch`` shows of a run, as one renderable."""

from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dflash_core.training.telemetry.status import RunLog

__all__ = ["sparkline", "view"]

LEVELS = "▁▂▃▄▅▆▇█"
WIDTH = 60
RECENT = 50
SILENT_S = 60.0


def view(log: RunLog) -> RenderableType:
    """Return the whole picture."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", justify="right")
    rows.add_column()
    for name, text in _rows(log):
        rows.add_row(name, text)
    bar = Table.grid()
    bar.add_row(_bar(log))
    return Group(_headline(log), bar, rows)


def sparkline(values: Sequence[float], *, width: int = WIDTH) -> str:
    """Draw values as blocks, the mean of each of at most ``width`` equal parts.

    Example:
        >>> sparkline([1, 2, 3, 4], width=4)
        '▁▃▆█'
    """
    width = min(width, len(values))
    edges = [len(values) * i // width for i in range(width + 1)] if width else []
    means = [fmean(values[a:b]) for a, b in pairwise(edges)]
    if not means:
        return ""
    low, span = min(means), max(means) - min(means)
    last = len(LEVELS) - 1
    return "".join(LEVELS[round((mean - low) / span * last) if span else 0] for mean in means)


def _headline(log: RunLog) -> Text:
    state = log.status.state if log.status else "starting"
    style = {"failed": "bold red", "finished": "bold green", "interrupted": "bold yellow"}
    folder = log.folder.parent if log.folder.name == "training" else log.folder
    text = Text.assemble((folder.name, "bold"), "  ", (state, style.get(state, "bold cyan")))
    done, total = _done(log)
    if total:
        text.append(f"  step {done:,} of {total:,}")
    if log.steps:
        last = log.steps[-1]
        text.append(f"  epoch {last['epoch'] + 1}, {last['epoch_progress']:.0%} through")
    if log.status and log.status.reason:
        text.append(f"\n{log.status.reason}")
    if state == "running" and log.steps and done < total:
        left_s = fmean(step["step_s"] for step in log.steps[-RECENT:]) * (total - done)
        text.append(f"  {timedelta(seconds=round(left_s))} left")
        if log.idle_s > SILENT_S:
            text.append(f"\nnothing new for {log.idle_s:.0f} s", style="yellow")
    return text


def _done(log: RunLog) -> tuple[int, int]:
    if log.steps:
        return log.steps[-1]["step"], log.steps[-1]["num_steps"]
    return (log.status.step, log.status.num_steps) if log.status else (0, 0)


def _bar(log: RunLog) -> ProgressBar:
    done, total = _done(log)
    return ProgressBar(total=max(total, 1), completed=done, width=WIDTH + 14)


def _rows(log: RunLog) -> list[tuple[str, RenderableType]]:
    if not log.steps:
        return []
    last, recent = log.steps[-1], log.steps[-RECENT:]
    rows: list[tuple[str, RenderableType]] = [
        ("loss", _curve(log.steps, "loss", "{:.3f}")),
        ("adjusted", _adjusted(log.steps)),
        ("acceptance", _curve(log.steps, "acceptance_at_anchors", "{:.2f} at drawn anchors")),
        ("accuracy", _by_position(last)),
        ("by length", _by_length(last)),
        ("tokens", _tokens(recent)),
        ("busy", _stages(recent)),
        ("queues", _queues(last)),
        ("optimizer", _optimizer(log.steps)),
        ("memory", f"{last['peak_memory_bytes'] / 2**30:.1f} GiB peak, all ranks"),
        ("held out", _held_out(log.steps)),
        ("forgotten", _forgotten(log.steps)),
    ]
    return [(name, text) for name, text in rows if text]


def _finite(steps: Sequence[dict[str, Any]], name: str) -> list[float]:
    values = (step.get(name) for step in steps)
    return [v for v in values if isinstance(v, int | float) and v == v and abs(v) != float("inf")]


def _curve(steps: Sequence[dict[str, Any]], name: str, shown: str) -> str:
    values = _finite(steps, name)
    if not values:
        return ""
    mean = fmean(values[-RECENT:])
    now = shown.format(values[-1])
    return f"{now}, mean of {len(values[-RECENT:])} steps {mean:.3f}\n{sparkline(values)}"


def _adjusted(steps: Sequence[dict[str, Any]]) -> str:
    values = _finite(steps, "loss_adjusted")
    if not values:
        return ""
    share = steps[-1].get("loss_explained_share")
    why = "" if share is None else f", composition explains {share:.0%} of the jumps"
    return f"{values[-1]:.3f}{why}\n{sparkline(values)}"


def _by_position(last: dict[str, Any]) -> str:
    shares = last.get("accuracy_by_position") or []
    if not shares:
        return f"{last['accuracy']:.1%}" if "accuracy" in last else ""
    return "by slot " + " ".join("-" if s is None else f"{s:.0%}" for s in shares)


def _by_length(last: dict[str, Any]) -> str:
    """Return the loss of each length group."""
    losses, edges = last.get("loss_by_length") or [], last.get("length_edges", [])
    pairs = zip(edges, losses, strict=False)
    return "  ".join(f"<={edge:,}: {loss:.2f}" for edge, loss in pairs if loss is not None)


def _tokens(recent: Sequence[dict[str, Any]]) -> str:
    seconds = sum(step["step_s"] for step in recent)
    rates = [
        f"{sum(step[field] for step in recent) / seconds:,.0f} {name}/s"
        for field, name in (
            ("real_tokens", "real"),
            ("token_slots", "slots"),
            ("supervised_tokens", "supervised"),
        )
    ]
    efficiency = sum(s["real_tokens"] for s in recent) / sum(s["token_slots"] for s in recent)
    return f"{', '.join(rates)}, padding efficiency {efficiency:.1%}"


def _stages(recent: Sequence[dict[str, Any]]) -> str:
    """Return how busy each stage's ranks are, and what the others wait for."""
    seconds = sum(step["step_s"] for step in recent)
    busy: dict[str, float] = {}
    for step in recent:
        for name, share in step.get("busy_shares", {}).items():
            busy[name] = busy.get(name, 0.0) + share * step["step_s"] / seconds
    busy["waiting"] = sum(_finite(recent, "wait_s")) / seconds
    shares = [f"{name} {share:.0%}" for name, share in busy.items()]
    names = [step["bottleneck"] for step in recent if "bottleneck" in step]
    slowest = [f"bottleneck {max(set(names), key=names.count)}"] if names else []
    return ", ".join([*shares, *slowest])


def _queues(last: dict[str, Any]) -> str:
    depths = last.get("queue_depths", {})
    return ", ".join(f"{name} {depth:.1f}" for name, depth in depths.items())


def _optimizer(steps: Sequence[dict[str, Any]]) -> str:
    last = steps[-1]
    skipped = last.get("skipped_steps") or sum(bool(step.get("skipped")) for step in steps)
    told = f", {skipped} steps skipped" if skipped else ""
    norm = "not finite" if last["grad_norm"] is None else f"{last['grad_norm']:.3g}"
    return f"rate {last['learning_rate']:.2e}, gradient norm {norm}{told}"


def _held_out(steps: Sequence[dict[str, Any]]) -> str:
    measured = [step for step in steps if "held_out_loss" in step]
    if not measured:
        return ""
    parts = [f"loss {measured[-1]['held_out_loss']:.3f} at step {measured[-1]['step']:,}"]
    decoded = _finite(steps, "held_out_acceptance")
    if decoded:
        parts.append(f"acceptance {decoded[-1]:.2f} by decoding, best {max(decoded):.2f}")
    return f"{', '.join(parts)}\n{sparkline(_finite(steps, 'held_out_loss'))}"


def _forgotten(steps: Sequence[dict[str, Any]]) -> RenderableType:
    told = [step for step in steps if step.get("forgotten_groups") is not None]
    if not told or not told[-1]["forgotten_groups"]:
        return ""
    edges = told[-1].get("length_edges", [])
    names = [_group(edges, group) for group in told[-1]["forgotten_groups"]]
    sentence = f"samples of {', '.join(names)} tokens get worse while the rest gets better"
    return Text(sentence, style="red")


def _group(edges: Sequence[int], group: int) -> str:
    low = edges[group - 1] + 1 if group else 1
    return f"{low:,} to {edges[group]:,}"
