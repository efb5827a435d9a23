"""A made-up machine whose true costs are known, and plans to run on it."""

import numpy as np

from dflash_core.planning import BatchingConfig, EpochPlan, plan_epoch
from dflash_core.throughput import Coefficients, CostModel, Fingerprint, RoleFit

TARGET = Coefficients(constant_s=2e-3, slot_s=3e-6, slot_length_s=2e-9)
DRAFT = Coefficients(
    constant_s=4e-3, document_s=5e-5, token_s=1e-6, anchor_token_s=4e-6, anchor_context_s=1e-9
)
PREFETCH = Coefficients(constant_s=1e-4, document_s=2e-5, slot_s=1e-8)

MARKS = Fingerprint(
    hardware="two cores",
    num_ranks=2,
    threads_per_rank=1,
    target="t",
    draft="d",
    block_size=8,
    precision="float32/float32",
    attention="sdpa",
    versions="1",
)


def machine(**changes: object) -> CostModel:
    known = {
        "prefetch": RoleFit(coefficients=PREFETCH),
        "target": RoleFit(coefficients=TARGET),
        "draft": RoleFit(coefficients=DRAFT),
        "step_s": 1e-3,
    }
    return CostModel.model_validate(known | changes)


def plan(
    *,
    strategy: str = "pooled",
    world_size: int = 2,
    num_samples: int = 600,
    mixing: str = "diverse",
    supervised: bool = True,
) -> EpochPlan:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(4.5, 0.8, num_samples).astype(np.int64) + 8, 1000)
    config = BatchingConfig.model_validate(
        {
            "strategy": strategy,
            "mixing": mixing,
            "token_budget": 2048,
            "pool_size": 128,
            "micro_batches_per_step": 6,
        }
    )
    return plan_epoch(
        lengths,
        config,
        epoch=0,
        seed=1,
        world_size=world_size,
        supervised=lengths // 2 if supervised else None,
    )
