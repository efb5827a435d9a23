"""Every figure of the planner in one run, as ratios: quality, speed, edges, growth, profile.

    python benchmarks/bench_planning.py [--growth 1,10,100] [--profile-rows 1000000]

Lengths are the seed shape: those of the run that this project started from, between its known
quantiles. Times are medians; the unit of planning time is one ``rng.permutation(N)`` plus one
stable argsort of uint16 lengths, taken in turns with the planner in the same process.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from dflash_core.bucketing import edge_efficiency, fit_buckets, histogram_of
from dflash_core.planning import (
    BatchingConfig,
    StrategyReport,
    compare_strategies,
    plan_epoch,
)

SHARES = (0, 0.167, 0.333, 0.5, 0.667, 0.833, 0.9, 0.99, 1)
QUANTILES = (65, 770, 1216, 1727, 2432, 3296, 4200, 4917, 8191)
NUM_SAMPLES = 902_087
SEED_EDGES = (770, 1216, 1728, 2432, 3296, 8192)
BUDGET, WORLD_SIZE, PER_STEP, REPEATS = 49_152, 8, 32, 7
console = Console(highlight=False, width=140)


def seed_shape(num_samples: int = NUM_SAMPLES) -> NDArray[np.int64]:
    draws = np.random.default_rng(0).random(num_samples)
    return np.interp(draws, SHARES, QUANTILES).astype(np.int64)


def config_of(strategy: str, **changes: object) -> BatchingConfig:
    settings = {"token_budget": BUDGET, "micro_batches_per_step": PER_STEP, "strategy": strategy}
    return BatchingConfig.model_validate({**settings, **changes})


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def verdict(value: float, limit: float, *, at_least: bool = False) -> str:
    return "[green]met" if (value >= limit if at_least else value <= limit) else "[red]MISSED"


def plan_once(lengths: NDArray[np.int64], strategy: str) -> object:
    return plan_epoch(lengths, config_of(strategy), epoch=0, seed=0, world_size=WORLD_SIZE)


def quality(lengths: NDArray[np.int64]) -> None:
    names = ("sorted", "random", "bucketed", "pooled", "packed")
    settings = {"mixings": ["diverse", "random"], "seed": 0, "world_size": WORLD_SIZE}
    reports = compare_strategies(lengths, config_of("pooled"), strategies=names, **settings)
    given = compare_strategies(
        lengths, config_of("bucketed", edges=SEED_EDGES), strategies=["bucketed"], **settings
    )
    table = Table(title=f"seed shape, budget {BUDGET:,}, {PER_STEP} a step on {WORLD_SIZE} ranks")
    for name in ("strategy", "mixing", "efficiency", "fill", "micro-batches", "length eta2"):
        table.add_column(name)
    for name in ("step eta2", "recurrence", "straggler", "max slots"):
        table.add_column(name)
    rows = [(report.name, report) for report in reports]
    for name, report in [*rows, *(("six given edges", report) for report in given)]:
        table.add_row(
            name,
            report.mixing,
            f"{report.padding_efficiency:.5f}",
            f"{report.budget_fill:.6f}",
            f"{report.num_micro_batches:,}",
            f"{report.length_eta2:.4f}",
            f"{report.step_length_eta2:.5f}",
            f"{report.pair_recurrence:.2e}",
            f"{report.straggler_factor:.4f}",
            f"{report.max_slots:,}",
        )
    console.print(table)
    check_quality({(report.name, report.mixing): report for report in reports})


def check_quality(reports: dict[tuple[str, str], StrategyReport]) -> None:
    pooled, packed = reports["pooled", "diverse"], reports["packed", "diverse"]
    lines = [
        ("pooled efficiency >= .990", pooled.padding_efficiency, 0.990, True),
        ("pooled recurrence <= 6e-3", pooled.pair_recurrence, 6e-3, False),
        ("pooled straggler <= 1.02", pooled.straggler_factor, 1.02, False),
        ("pooled step_length_eta2 <= .01", pooled.step_length_eta2, 0.01, False),
        ("pooled max slots <= budget", pooled.max_slots, BUDGET, False),
        ("packed fill >= .9999", packed.budget_fill, 0.9999, True),
        ("packed length_eta2 <= .06", packed.length_eta2, 0.06, False),
    ]
    for words, value, limit, at_least in lines:
        console.print(f"  {words}: {value:.6g} {verdict(value, limit, at_least=at_least)}")
    dealt = reports["pooled", "random"].straggler_factor
    console.print(f"  straggler of the same micro-batches dealt at random: {dealt:.3f}")


def speed(lengths: NDArray[np.int64]) -> float:
    small = lengths.astype(np.uint16)
    rng = np.random.default_rng(0)
    limits = {"pooled": 4.0, "packed": 10.0, "bucketed": 4.0, "sorted": 4.0, "random": 4.0}
    compiling = {name: seconds(lambda name=name: plan_once(lengths, name)) for name in limits}
    units: list[float] = []
    times: dict[str, list[float]] = {name: [] for name in limits}
    for _ in range(REPEATS):
        units.append(
            seconds(lambda: (rng.permutation(small.size), np.argsort(small, kind="stable")))
        )
        for name, own in times.items():
            own.append(seconds(lambda name=name: plan_once(lengths, name)))
    unit = statistics.median(units)
    console.print(f"unit: permutation + stable argsort of uint16 = {1000 * unit:.0f} ms")
    for name, own in times.items():
        ratio = statistics.median(own) / unit
        console.print(
            f"  plan {name}: {1000 * statistics.median(own):.0f} ms = {ratio:.2f} units, limit "
            f"{limits[name]:.0f} {verdict(ratio, limits[name])}[/] (first call, with compiling or "
            f"its cache: {compiling[name]:.2f} s)"
        )
    return unit


def edges(lengths: NDArray[np.int64], unit: float) -> None:
    histogram = histogram_of(lengths)
    for num_buckets, known in ((6, None), (24, 0.9486), (32, 0.9609), (128, None)):
        fitted = fit_buckets(histogram, num_buckets=num_buckets)
        runs = [
            seconds(lambda k=num_buckets: fit_buckets(histogram, num_buckets=k))
            for _ in range(REPEATS)
        ]
        milliseconds = 1000 * statistics.median(runs)
        efficiency = edge_efficiency(histogram, fitted.tolist())
        line = f"  fit {num_buckets} edges: {milliseconds:.1f} ms = "
        line += f"{milliseconds / 1000 / unit:.2f} units, to edge {efficiency:.4f}"
        if known is not None:
            line += f", optimum by brute force {known} "
            line += verdict(abs(efficiency - known), 0.00005)
        if num_buckets == 32:
            line += f"[/], limit 50 ms {verdict(milliseconds, 50)}"
        console.print(line)


def growth(millions: list[int]) -> None:
    """Plan in a process of its own per size and strategy, and read its peak memory."""
    limits = {"pooled": 24, "bucketed": 24, "packed": 40}
    for strategy, limit in limits.items():
        for size in millions:
            command = [sys.executable, __file__, "--one", strategy, str(size * 1_000_000)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            facts = json.loads(done.stdout)
            per_sample = facts["peak_bytes"] / (size * 1_000_000)
            console.print(
                f"  {strategy} {size}M: {1e9 * facts['plan_s'] / (size * 1e6):.0f} ns a sample, "
                f"{facts['plan_s'] / facts['permutation_s']:.1f} x a permutation of as many; "
                f"{per_sample:.1f} bytes a sample beyond the input, limit {limit} "
                f"{verdict(per_sample, limit)}"
            )


def plan_one(strategy: str, num_samples: int) -> None:
    # Chunks, so that making the input does not set the peak.
    lengths = np.empty(num_samples, dtype=np.int32)
    for start in range(0, num_samples, 1 << 20):
        stop = min(start + (1 << 20), num_samples)
        draws = np.random.default_rng(start).random(stop - start)
        lengths[start:stop] = np.interp(draws, SHARES, QUANTILES)
    plan_once(lengths[:5000], strategy)  # compile
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = status_bytes("VmRSS")
    elapsed = seconds(lambda: plan_once(lengths, strategy))
    facts = {"plan_s": elapsed, "peak_bytes": status_bytes("VmHWM") - before}
    facts["permutation_s"] = seconds(lambda: np.random.default_rng(0).permutation(num_samples))
    sys.stdout.write(json.dumps(facts))


def status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise KeyError(name)


def profile(num_rows: int) -> None:
    """Profile tokens in Parquet against Polars' own scan of the same columns, in processes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.parquet"
        write_tokens(path, num_rows)
        half = Path(folder) / "half.parquet"
        write_tokens(half, num_rows // 2)
        results: dict[str, list[float]] = {"scan": [], "profile": []}
        for _ in range(3):
            for kind, own in results.items():
                own.append(float(profile_in_process(kind, path)["s"]))
        ratio = statistics.median(results["profile"]) / statistics.median(results["scan"])
        peaks = [profile_in_process("profile", file)["peak_bytes"] / 2**20 for file in (half, path)]
        console.print(
            f"  profile {num_rows:,} rows, {path.stat().st_size / 2**20:,.0f} MiB: {ratio:.2f} x "
            f"Polars' scan, limit 1.3 {verdict(ratio, 1.3)}[/]; peak memory {peaks[0]:,.0f} MiB "
            f"for half the rows, {peaks[1]:,.0f} MiB for all"
        )


def profile_in_process(kind: str, path: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--scan", kind, str(path)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def scan_one(kind: str, path: Path) -> None:
    import polars as pl

    from dflash_core.profiling import profile_data

    def scan() -> None:
        frame = pl.scan_parquet(path)
        frame.select(
            pl.col("input_ids").list.len().sum(), pl.col("loss_mask").list.sum().sum()
        ).collect(engine="streaming")

    elapsed = seconds(scan if kind == "scan" else lambda: profile_data([path]))
    sys.stdout.write(json.dumps({"s": elapsed, "peak_bytes": status_bytes("VmHWM")}))


def write_tokens(path: Path, num_rows: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # A twelfth of the seed shape's lengths keeps the file small enough for any disk.
    lengths = np.maximum(seed_shape(num_rows) // 12, 1)

    def batches() -> Iterator[pa.RecordBatch]:
        rng = np.random.default_rng(0)
        for start in range(0, num_rows, 8192):
            own = lengths[start : start + 8192]
            offsets = pa.array(np.concatenate([[0], np.cumsum(own)]).astype(np.int32))
            ids = pa.array(rng.integers(0, 150_000, own.sum(), dtype=np.int32))
            mask = pa.array(rng.random(own.sum()) < 0.5)
            columns = [pa.ListArray.from_arrays(offsets, values) for values in (ids, mask)]
            yield pa.record_batch(columns, names=["input_ids", "loss_mask"])

    writer = None
    for batch in batches():
        writer = pq.ParquetWriter(path, batch.schema) if writer is None else writer
        writer.write_batch(batch, row_group_size=8192)
    assert writer is not None
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--growth", default="1,10", help="millions of samples (default 1,10)")
    parser.add_argument("--profile-rows", type=int, default=200_000)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--scan", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        return plan_one(arguments.one[0], int(arguments.one[1]))
    if arguments.scan:
        return scan_one(arguments.scan[0], Path(arguments.scan[1]))
    console.print(f"{platform.processor() or platform.machine()}, {datetime.now(UTC):%Y-%m-%d}")
    lengths = seed_shape()
    edges(lengths, speed(lengths))
    quality(lengths)
    growth([int(part) for part in arguments.growth.split(",") if part])
    if arguments.profile_rows:
        profile(arguments.profile_rows)
    return None


if __name__ == "__main__":
    main()
