"""AdamW with linear warm-up and cosine decay over the exact number of steps."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from dflash_core.training.config import OptimizerConfig

__all__ = ["build_optimizer", "learning_rate", "set_learning_rate"]


def build_optimizer(
    parameters: Sequence[nn.Parameter], config: OptimizerConfig
) -> torch.optim.AdamW:
    """Return AdamW; only matrices decay, norms and biases do not."""
    matrices = [p for p in parameters if p.ndim >= 2]
    others = [p for p in parameters if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)


def learning_rate(step: int, num_steps: int, config: OptimizerConfig) -> float:
    """Return the learning rate of a step.

    Args:
        step: Step, counted from 0.
        num_steps: Steps of the whole run.
        config: Peak, warm-up and floor.

    Example:
        >>> config = OptimizerConfig(learning_rate=1.0, warmup_ratio=0.2)
        >>> [round(learning_rate(step, 10, config), 2) for step in (0, 1, 2, 6, 9)]
        [0.5, 1.0, 1.0, 0.5, 0.04]
    """
    warmup = math.ceil(config.warmup_ratio * num_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(num_steps - warmup, 1)
    floor = config.min_lr_ratio
    share = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * share


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Give every parameter group the same learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = value
