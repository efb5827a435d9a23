"""Plan, simulate and gate 902,087 samples: 5 strategies x 3 mixings x 5 topologies.

    python benchmarks/bench_gate.py

Wall seconds of the whole, and CPU seconds, which other load does not change. Compiled code is
warmed up on a small corpus first.
"""

import time

import numpy as np
from startup_run import seed_shape

from dflash_core.planning import (
    STRATEGIES,
    BatchingConfig,
    compare_strategies,
    relayout,
)
from dflash_core.throughput import (
    Candidate,
    Coefficients,
    CostModel,
    GateConfig,
    RoleFit,
    Workload,
    judge,
    predict,
    splits_of,
)

SCALES = (0.96, 0.98, 1.02, 1.05)  # of the fits that leave a shape out


def role(**terms: float) -> RoleFit:
    """Return a role whose fits differ as a real calibration's do."""
    others = [{name: scale * value for name, value in terms.items()} for scale in SCALES]
    return RoleFit(
        coefficients=Coefficients(**terms),
        alternatives=tuple(Coefficients(**other) for other in others),
    )


COST = CostModel(
    prefetch=role(constant_s=1e-3, document_s=1e-5),
    target=role(constant_s=1e-2, slot_s=2e-5, slot_length_s=2e-9),
    draft=role(constant_s=1e-2, token_s=5e-6, anchor_token_s=1e-6),
    step_s=0.05,
    jitter=0.02,
)
MIXINGS = ("diverse", "synchronised", "random")
BLOCK_SIZE = 16


def gate_all(lengths: np.ndarray) -> int:
    """Return how many candidates were judged."""
    supervised = lengths // 2
    config = BatchingConfig(token_budget=49_152, micro_batches_per_step=32)
    reports = compare_strategies(
        lengths,
        config,
        strategies=tuple(STRATEGIES),
        mixings=MIXINGS,
        seed=0,
        world_size=8,
        supervised=supervised,
    )
    workloads: dict[str, Workload] = {}
    candidates = []
    for report in reports:
        if report.name not in workloads:  # composition does not depend on the mixing
            workloads[report.name] = Workload.of_plan(report.plan, block_size=BLOCK_SIZE)
        for split in splits_of(8)[:5]:  # as the start-up run would have had them
            plan = report.plan
            if split.num_consumers != 8:
                plan = relayout(plan, world_size=split.num_consumers)
            prediction = predict(
                plan,
                COST,
                block_size=BLOCK_SIZE,
                topology=split,
                workload=workloads[report.name],
            )
            candidates.append(
                Candidate(
                    name=f"{report.name} {split.label}",
                    mixing=report.mixing,
                    prediction=prediction,
                    padding_efficiency=report.padding_efficiency,
                    length_eta2=report.length_eta2,
                    step_length_eta2=report.step_length_eta2,
                    pair_recurrence=report.pair_recurrence,
                    straggler_factor=report.straggler_factor,
                )
            )
    result = judge(candidates, GateConfig(min_share_of_best=0.8))
    print(result.reason)
    return len(candidates)


def main() -> None:
    lengths = seed_shape()
    gate_all(lengths[:5_000])
    wall, cpu = time.perf_counter(), time.process_time()
    count = gate_all(lengths)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"{lengths.size:,} samples, {count} candidates: {wall:.1f} s wall, {cpu:.1f} s CPU")


if __name__ == "__main__":
    main()
