"""First weights from the target, so that a short training does not begin at nothing.

The drafter's layers are decoder layers of the target's family, reading a mix of its hidden states:
copies of the target's own layers already know the text, and have to learn only to look ahead.
"""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from dflash_core.draft.model import DraftModel
from dflash_core.errors import DraftError

__all__ = ["copied_layer_ids", "copy_target_layers", "norm_scale"]


def copied_layer_ids(num_layers: int, num_target_layers: int) -> list[int]:
    """Return the target layer that each drafter layer begins as: evenly spread, the last included.

    Example:
        >>> copied_layer_ids(2, 6)
        [2, 5]
        >>> copied_layer_ids(3, 2)
        [0, 0, 1]
    """
    return [max((i + 1) * num_target_layers // num_layers - 1, 0) for i in range(num_layers)]


@torch.no_grad()
def copy_target_layers(model: DraftModel, target: Any) -> None:
    """Copy decoder layers of the target, and let the features enter as their mean.

    Args:
        model: The drafter, changed in place.
        target: The target.

    Raises:
        DraftError: The target's layers have other tensors than the drafter's.
    """
    decoder = target.model.get_decoder()
    ids = copied_layer_ids(len(model.layers), len(decoder.layers))
    for layer, target_id in zip(model.layers, ids, strict=True):
        source, own = decoder.layers[target_id].state_dict(), layer.state_dict()
        shapes = [{name: tuple(x.shape) for name, x in states.items()} for states in (source, own)]
        for name in sorted(shapes[0].keys() | shapes[1].keys()):
            # A tensor that only the target has, such as a norm after the MLP, says that those of
            # the same names do something else there.
            theirs, ours = (shape.get(name, "missing") for shape in shapes)
            if theirs != ours:
                raise DraftError(
                    f"draft.initial_weights 'target' needs layers like the drafter's, but {name} "
                    f"is {theirs} in the target's layer {target_id} and {ours} in the drafter's; "
                    "set draft.initial_weights to 'random' or leave the drafter's widths to the "
                    "target"
                )
        for name, tensor in own.items():
            found = source[name]
            if name.endswith("norm.weight"):
                norm = decoder.layers[target_id].get_submodule(name.removesuffix(".weight"))
                found = norm_scale(norm, len(tensor))
            tensor.copy_(found)
    width = model.spec.hidden_size
    num_features = model.fc.in_features // width
    model.fc.weight.copy_(torch.eye(width).repeat(1, num_features) / num_features)


@torch.no_grad()
def norm_scale(norm: nn.Module, width: int) -> Tensor:
    """Return what a norm multiplies normalised values by, shape ``(width,)``, float32 on the CPU.

    Some families keep it as the weight, others as the weight less 1: the norm itself is asked.
    """
    norm = deepcopy(norm).float()
    device = next((p.device for p in norm.parameters()), None)
    # Opposite signs in turn have mean 0, for norms that subtract it; a power of two this large
    # keeps eps and rounding out, and the difference of both signs a bias.
    signs_D = 1.0 - 2.0 * (torch.arange(width, device=device) % 2)
    loud_1D = (signs_D * 2.0**10)[None]
    return ((norm(loud_1D) - norm(-loud_1D))[0] / 2 * signs_D).cpu()
