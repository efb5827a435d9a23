"""What is trained, spread over the ranks that train it: weights, gradients and moments (FSDP2).

Each layer's weights are gathered just before it runs, forward and backward, and freed after it; its
gradient is summed over the ranks as soon as it is known, and each rank keeps its share. Gradients
therefore stay spread between the micro-batches of a step, at the price of one reduction for each
micro-batch instead of one for each step.

The ranks run what they share equally often: micro-batches come in *rounds* that follow from the
plan, at most one a rank, and a rank without one runs next to nothing with weight 0. It cannot
deadlock with features that come from other ranks: whatever stands in an earlier round comes earlier
in the run, and every rank has taken its share of the rounds before, so that what the round's last
rank waits for is never held back by another's full queue.

Outside this module and `FlatGradients` a spread tensor looks like a whole one.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from dflash_core.training.ranks.groups import Ranks

__all__ = ["load_spread", "spread", "whole"]


def spread(
    module: nn.Module,
    layers: Iterable[nn.Module],
    ranks: Ranks,
    *,
    precision: str,
    forwards: Sequence[str] = (),
) -> None:
    """Keep only this rank's share of a module, in float32 on this rank's device.

    Args:
        module: Alike on all ranks, in host memory unless the device holds it whole; its own
            forward must run first.
        layers: Parts that are gathered one at a time; the rest is gathered as one.
        ranks: This process among the others, which share what is trained.
        precision: Precision of gathered weights and of what the layers hand on.
        forwards: Methods of all parts, besides ``forward``, that read weights.
    """
    mesh = DeviceMesh.from_group(ranks.spread, ranks.device.type)
    # Casts by autocast would be kept whole until the backward: weights are gathered as cast ones.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    if precision == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*layers, module):
        # One at a time, so that never more than one whole layer is on the device.
        part.float().to(ranks.device)
        shared: Any = fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        shared.set_gradient_divide_factor(1.0)  # sums, as the step's weight is known at its end
        shared.set_force_sum_reduction_for_comms(True)  # gloo knows no other
        for name in forwards:
            register_fsdp_forward_method(part, name)


def whole(state: Any, *, keep: bool) -> Any:
    """Return a state with whole tensors; every rank that has a share calls this.

    Args:
        state: Nested dictionaries and lists of tensors and plain values.
        keep: Whether this rank needs the result. Spread tensors are gathered one at a time, and
            those that are not needed are dropped at once.
    """
    known: dict[int, Tensor | None] = {}  # tied weights stand in a state twice

    def visit(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: visit(item) for name, item in value.items()}
        if isinstance(value, list):
            return [visit(item) for item in value]
        if isinstance(value, DTensor):
            if id(value) not in known:
                share: Any = value.detach()
                tensor = share.full_tensor()
                known[id(value)] = tensor.cpu() if keep else None
            return known[id(value)]
        return value.detach() if isinstance(value, Tensor) else value

    return visit(state)


def load_spread(
    module: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Load whole weights and a whole optimizer's state into what may be spread.

    Args:
        module: What is trained.
        optimizer: Its optimizer.
        state: A checkpoint, with ``module`` and ``optimizer``.
    """
    own, weights = module.state_dict(), state["module"]
    module.load_state_dict({n: _share_of(t, own.get(n, t)) for n, t in weights.items()})
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    moments = {
        index: {name: _share_of(value, parameters[index]) for name, value in entry.items()}
        for index, entry in state["optimizer"]["state"].items()
    }
    optimizer.load_state_dict({**state["optimizer"], "state": moments})


def _share_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's share of a whole tensor, or the tensor where the other is whole."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    # Every rank cuts its share out of the same file: nothing is sent.
    share = distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    return share.clone()
