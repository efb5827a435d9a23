"""The start-up run's throughput from its lengths alone, and what other plans would have given.

902,087 samples on 8 GPUs, budget 49,152: measured were sorted 32.0 Ktok/s, full shuffle 11.9 and
six given edges 25.1. Two terms are fitted on the first two runs; the third is projected. The
interval is the spread over the other admissible forms of two terms. Packed rows are taken to attend
to their own document only: that needs an attention kernel which skips what the mask hides.

    python benchmarks/startup_run.py [--figure FILE.png]
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from dflash_core.planning import BatchingConfig, plan_epoch
from dflash_core.throughput import Observation, PlanTotals, Projection, fit_forms

SHARES = (0, 0.167, 0.333, 0.5, 0.667, 0.833, 0.9, 0.99, 1)
LENGTHS = (65, 770, 1216, 1727, 2432, 3296, 4200, 4917, 8191)
GIVEN_EDGES = (770, 1216, 1728, 2432, 3296, 8192)
MEASURED = {"sorted": 32.0, "random": 11.9, "6 given edges": 25.1}
FITTED = ("sorted", "random")
PLANS = {
    "sorted": {"strategy": "sorted"},
    "random": {"strategy": "random"},
    "6 given edges": {"strategy": "bucketed", "edges": GIVEN_EDGES},
    "24 optimal edges": {"strategy": "bucketed", "num_buckets": 24},
    "pooled": {"strategy": "pooled"},
    "packed": {"strategy": "packed"},
}


def seed_shape(num_samples: int = 902_087) -> np.ndarray:
    """Return lengths of the start-up run's shape."""
    drawn = np.random.default_rng(0).random(num_samples)
    return np.interp(drawn, SHARES, LENGTHS).astype(np.int64)


def plans_of(lengths: np.ndarray) -> dict[str, tuple[float, PlanTotals]]:
    """Return padding efficiency and totals of each plan."""
    found = {}
    for name, settings in PLANS.items():
        config = BatchingConfig(token_budget=49_152, micro_batches_per_step=32, **settings)
        plan = plan_epoch(lengths, config, epoch=0, seed=0, world_size=8)
        found[name] = plan.padding_efficiency, PlanTotals.of(plan)
    return found


def project(plans: dict[str, tuple[float, PlanTotals]]) -> Projection:
    """Fit the admissible forms on the sorted and the shuffled run."""
    return fit_forms([Observation(totals=plans[name][1], ktok_s=MEASURED[name]) for name in FITTED])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figure", type=Path)
    figure = parser.parse_args().figure
    plans = plans_of(seed_shape())
    forms = project(plans)
    for form in forms.forms:
        terms = " + ".join(
            f"{value:.4g} {term}" for term, value in zip(form.terms, form.coefficients, strict=True)
        )
        print(f"admissible: seconds = {terms}")
    print(f"{'plan':18}{'efficiency':>11}{'predicted':>11}{'low':>8}{'high':>8}{'measured':>10}")
    rows = {name: forms.ktok_s(totals) for name, (_, totals) in plans.items()}
    for name, (best, low, high) in rows.items():
        measured = f"{MEASURED[name]:10.1f}" if name in MEASURED else ""
        print(f"{name:18}{plans[name][0]:11.4f}{best:11.1f}{low:8.1f}{high:8.1f}{measured}")
    if figure is not None:
        draw(rows, figure)


def draw(rows: dict[str, tuple[float, float, float]], file: Path) -> None:
    """Draw predicted values with their intervals, and what was measured."""
    axes = plt.figure(figsize=(7, 3.4), layout="constrained").subplots()
    places = np.arange(len(rows))
    best, low, high = np.array(list(rows.values())).T
    axes.barh(places, best, color="#b9c9dd", height=0.6, label="predicted")
    axes.errorbar(
        best, places, xerr=[best - low, high - best], fmt="none", color="#27496d", capsize=5
    )
    for place, (value, least, most) in enumerate(rows.values()):
        interval = "" if most - least < 0.05 else f"  ({least:.1f}..{most:.1f})"
        axes.text(0.4, place, f"{value:.1f}{interval}", va="center", color="#27496d")
    names = list(rows)
    for label, known, face in (
        ("measured, fitted", FITTED, "white"),
        ("measured, not seen by the fit", set(MEASURED) - set(FITTED), "#c4451c"),
    ):
        speeds = [MEASURED[name] for name in known]
        places_known = [names.index(name) for name in known]
        axes.plot(speeds, places_known, "D", mfc=face, mec="#c4451c", label=label)
    axes.set(yticks=places, yticklabels=names, xlabel="Ktok/s (real tokens, 8 GPUs)", xlim=(0, 36))
    axes.invert_yaxis()
    axes.legend(loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=3, frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    plt.gcf().savefig(file, dpi=130)


if __name__ == "__main__":
    main()
