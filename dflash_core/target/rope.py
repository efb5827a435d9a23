"""RoPE kinds that follow the longest position of a call, held at what servers use for all calls.

transformers computes ``dynamic`` and ``longrope`` anew from the longest position of each call, so
that a document's features depend on its neighbour in the batch, and keys in a cache on when they
were made. vLLM has one set for every position (0.33: ``longrope`` by whether ``max_model_len``,
by default the model's ``max_position_embeddings``, is over the original length; ``dynamic`` at
``factor`` times that length). So has this project.
"""

from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash_core.errors import TargetError
from dflash_core.target.families import LENGTH_DEPENDENT, rope_of_layers

__all__ = ["freeze_rope"]


@torch.no_grad()
def freeze_rope(model: Any) -> None:
    """Hold the frequencies of every rotary module of a transformers model, in place.

    Args:
        model: The model, or one rotary module.

    Raises:
        TargetError: Its config names such a kind, and no module of transformers computes it.
    """
    held = 0
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        of_layers: dict[Any, Any] = dict(kinds) if isinstance(kinds, dict) else {None: kinds}
        for layers in [name for name, kind in of_layers.items() if kind in LENGTH_DEPENDENT]:
            _hold(module, of_layers[layers], layers)
            of_layers[layers] = "default"  # which transformers never computes anew
            module.rope_type = of_layers if layers is not None else "default"
            held += 1
    kinds = {rope.get("rope_type") for rope in rope_of_layers(model.config.get_text_config())}
    if not held and (wanted := kinds & set(LENGTH_DEPENDENT)):
        raise TargetError(
            f"rope_type '{wanted.pop()}' depends on the longest position of a call, and the "
            f"{type(model).__name__} that computes it is not transformers' own, so it cannot be "
            "held; set target.trust_remote_code to false, or rope_parameters in the target's "
            "config.json to another kind"
        )


def _hold(module: Any, kind: str, layers: str | None) -> None:
    rope, prefix = module.config.rope_parameters, ""
    if layers is not None:
        rope, prefix = rope[layers], f"{layers}_"
    longest = module.config.max_position_embeddings * (rope["factor"] if kind == "dynamic" else 1)
    held = getattr(module, f"{prefix}inv_freq")
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](
        module.config, held.device, seq_len=longest, layer_type=layers
    )
    held.copy_(frequencies)
    setattr(module, f"{prefix}attention_scaling", scaling)
