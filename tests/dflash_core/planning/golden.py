"""The small plan that is held byte for byte. Run this file to write it anew, and say why."""

import json
from pathlib import Path

import numpy as np

from dflash_core.planning import STRATEGIES, BatchingConfig, plan_epoch

GOLDEN = Path(__file__).with_name("golden.json")
MIXINGS = {
    "sorted": "random",
    "random": "synchronised",
    "bucketed": "diverse",
    "pooled": "diverse",
    "packed": "diverse",
}


def golden_plans() -> dict[str, dict[str, object]]:
    """Plan 40 samples under every strategy."""
    lengths = (np.arange(40) * 37) % 61 + 3
    plans = {}
    for strategy in STRATEGIES:
        config = BatchingConfig(
            strategy=strategy,
            token_budget=160,
            micro_batches_per_step=4,
            mixing=MIXINGS.get(strategy, "diverse"),
            num_buckets=4,
            pool_size=20,
            tail="repeat",
        )
        plan = plan_epoch(lengths, config, epoch=2, seed=7, world_size=2, supervised=lengths // 2)
        plans[strategy] = {
            "order": plan.order.tolist(),
            "offsets": plan.offsets.tolist(),
            "padded_lengths": plan.padded_lengths.tolist(),
            "assignment": plan.assignment.tolist(),
            "loss_weight": plan.loss_weight.tolist(),
            "content_hash": plan.content_hash,
            "layout_hash": plan.layout_hash,
        }
    return plans


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden_plans()) + "\n", encoding="utf-8")
