"""``dflash-flow plan``: batching strategies side by side on real lengths."""

import argparse
import json
import sys
from pathlib import Path
from typing import get_args

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dflash_core.artifacts import atomic_write, check_replaceable, new_artifact
from dflash_core.bucketing.config import EdgeGrid, EdgeObjective, ShapeCost
from dflash_core.errors import ConfigError
from dflash_core.planning import (
    STRATEGIES,
    BatchingConfig,
    StrategyReport,
    compare_strategies,
    comparison_json,
)
from dflash_core.planning.config import Mixing, Oversize, Tail
from dflash_core.profiling import read_lengths
from flows.cli.advice import advise_all, show_advice
from flows.cli.profile import add_columns, columns_of
from tasks.terminal import Terminal

__all__ = ["add_arguments", "run"]

DEFAULTS = BatchingConfig()
COMPARISON_KIND = "plan-comparison"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "data", type=Path, metavar="DATA|LENGTHS", help="token data, a token store, lengths (.npy)"
    )
    parser.add_argument("--strategies", default=",".join(STRATEGIES), metavar="A,B")
    parser.add_argument(
        "--mixing", choices=[*get_args(Mixing), "all"], default="diverse", help="default diverse"
    )
    _add_whole(parser, "token-budget", DEFAULTS.token_budget, "most slots of a micro-batch")
    _add_whole(parser, "world-size", 1, "ranks that consume micro-batches")
    _add_whole(
        parser,
        "micro-batches-per-step",
        DEFAULTS.micro_batches_per_step,
        "micro-batches of an optimizer step over all ranks",
    )
    _add_whole(parser, "num-buckets", DEFAULTS.num_buckets, "buckets to fit")
    parser.add_argument("--edges", type=_edges, metavar="N,N", help="given edges, not fitted")
    parser.add_argument(
        "--edge-objective",
        choices=get_args(EdgeObjective),
        default=DEFAULTS.edge_objective,
        help=f"what fitted edges minimise (default {DEFAULTS.edge_objective})",
    )
    parser.add_argument(
        "--edge-cost",
        type=_cost,
        default=DEFAULTS.edge_cost,
        metavar="C,S,L",
        help="objective cost: of a micro-batch, a slot, and a slot for each token of its row",
    )
    parser.add_argument(
        "--edge-grid",
        choices=get_args(EdgeGrid),
        default=DEFAULTS.edge_grid,
        help="harmonic: only edges whose whole rows use the budget up",
    )
    parser.add_argument("--pad-to", choices=["batch", "edge"], default=DEFAULTS.pad_to)
    _add_whole(parser, "multiple-of", DEFAULTS.multiple_of, "padded lengths are multiples of this")
    _add_whole(parser, "pool-size", DEFAULTS.pool_size, "samples that pooled sorts together")
    _add_whole(parser, "max-length", None, "longest usable sample")
    _add_whole(parser, "max-samples", None, "most samples of a micro-batch")
    _add_whole(parser, "anchor-budget", None, "most anchors of a micro-batch")
    parser.add_argument("--oversize", choices=get_args(Oversize), default=DEFAULTS.oversize)
    parser.add_argument("--tail", choices=get_args(Tail), default=DEFAULTS.tail)
    _add_whole(parser, "seed", 0, "of all random choices")
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="cost model of dflash-flow calibrate: predict Ktok/s and rank splits of the ranks",
    )
    _add_whole(parser, "gpus", 8, "ranks to divide between target and drafter")
    parser.add_argument(
        "--elsewhere",
        action="store_true",
        help="the calibration is of another machine, plan for it",
    )
    _add_whole(parser, "block-size", None, "block size of the drafter, as calibrated")
    _add_whole(parser, "epochs", 1, "epochs of the run, for its hours")
    add_columns(parser)
    parser.add_argument("--save", type=Path, metavar="DIR", help="write plans and picture there")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--details", action="store_true", help="with --json: all measures of diversity, and hashes"
    )


def run(arguments: argparse.Namespace) -> int:
    """Compare the strategies and show one row for each."""
    settings = {
        name: value
        for name, value in vars(arguments).items()
        if name in BatchingConfig.model_fields
    }
    mixings = get_args(Mixing) if arguments.mixing == "all" else (arguments.mixing,)
    config = BatchingConfig.model_validate({**settings, "mixing": mixings[0]})
    if arguments.save is not None:
        check_replaceable(arguments.save, kind=COMPARISON_KIND)
    lengths, supervised = read_lengths(arguments.data, columns=columns_of(arguments))
    reports = compare_strategies(
        lengths,
        config,
        strategies=_strategies(arguments.strategies),
        mixings=mixings,
        seed=arguments.seed,
        world_size=arguments.world_size,
        supervised=supervised,
    )
    comparison = comparison_json(reports, config.token_budget, details=arguments.details)
    advice = None
    if arguments.calibration is not None:
        advice = advise_all(arguments, config, reports, lengths, supervised)
        comparison["advice"] = advice.model_dump(mode="json")
    if arguments.save is not None:
        whole = comparison_json(reports, config.token_budget, details=True)
        _save(arguments.save, reports, comparison | whole)
    if arguments.json:
        sys.stdout.write(json.dumps(comparison) + "\n")
    else:
        _show(reports, comparison)
        if advice is not None:
            show_advice(advice)
    return 0


def _add_whole(parser: argparse.ArgumentParser, name: str, default: int | None, what: str) -> None:
    shown = "" if default is None else f" (default {default:,})"
    parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=what + shown)


def _edges(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"'{text}' is no list of whole numbers; give edges like 512,1024"
        ) from None


def _cost(text: str) -> ShapeCost:
    try:
        values = dict(zip(ShapeCost.model_fields, map(float, text.split(",")), strict=True))
        return ShapeCost.model_validate(values)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"'{text}' is no list of three costs of at least 0; give them like 0.01,2e-5,7e-9"
        ) from None


def _strategies(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ConfigError(f"--strategies names none; give some of {', '.join(STRATEGIES)}")
    return names


def _show(reports: list[StrategyReport], comparison: dict[str, object]) -> None:
    console = Terminal()
    for mixing in dict.fromkeys(report.mixing for report in reports):
        title = (
            f"{comparison['num_samples']:,} samples, {comparison['total_tokens']:,} tokens, "
            f"budget {comparison['token_budget']:,}, mixing {mixing}"
        )
        # Short enough for 80 columns.
        names = ["effi-\nciency", "micro-\nbatches", "\nsteps", "length\neta2", "step\neta2"]
        names += ["recur-\nrence", "strag-\ngler", "\nshapes", "plan\ns"]
        table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column("\nstrategy", no_wrap=True)
        for name in names:
            table.add_column(name, justify="right")
        for report in reports:
            if report.mixing == mixing:
                table.add_row(report.name, *_figures(report))
        console.print(table)
    floors = reports[0].diversity
    console.print(
        "eta2 is the share of length variance between micro-batches or steps: 1 is one length "
        f"class each; chance gives {floors.length_eta2_floor:.3f} and "
        f"{floors.step_length_eta2_floor:.2g}"
    )
    pool_size = reports[0].plan.identity.config.pool_size
    if any(r.name == "pooled" for r in reports) and reports[0].plan.num_samples < 4 * pool_size:
        console.print(
            f"pooled: pools of {pool_size:,} hold much of {reports[0].plan.num_samples:,} samples, "
            "so that the same ones meet again and again; try a lower --pool-size"
        )
    for report in reports:
        if report.num_dropped or report.plan.num_truncated:
            reasons = ", ".join(f"{count:,} {why}" for why, count in report.plan.dropped.items())
            console.print(
                f"{report.name}, {report.mixing}: {report.num_dropped:,} samples dropped"
                f"{f' ({reasons})' if reasons else ''}, {report.plan.num_truncated:,} truncated"
            )


def _figures(report: StrategyReport) -> list[str]:
    return [
        f"{report.padding_efficiency:.4f}",
        f"{report.num_micro_batches:,}",
        f"{report.num_steps:,}",
        f"{report.length_eta2:.3f}",
        _small(report.step_length_eta2),
        _small(report.pair_recurrence),
        f"{report.straggler_factor:.3f}",
        f"{report.distinct_shapes:,}",
        f"{report.plan_s:.2f}",
    ]


def _small(share: float) -> str:
    return f"{share:.4f}" if share == 0 or share >= 1e-4 else f"{share:.0e}"


def _save(path: Path, reports: list[StrategyReport], comparison: dict[str, object]) -> None:
    import numpy as np

    from dflash_core.reporting.trade import draw_trade

    with new_artifact(path, kind=COMPARISON_KIND, format_version=1) as out:
        atomic_write(out / "comparison.json", json.dumps(comparison, indent=1) + "\n")
        draw_trade(reports, out / "trade.png")
        for report in reports:
            plan = report.plan
            np.savez(
                out / f"{report.name}-{report.mixing}.npz",
                order=plan.order,
                offsets=plan.offsets,
                padded_lengths=plan.padded_lengths,
                assignment=plan.assignment,
                loss_weight=plan.loss_weight,
            )
