"""Whether a loaded model is what its config lets us take it for: a few tokens, run once.

Legend: T tokens, F features, D width, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_core.errors import TargetError
from dflash_core.target.families import target_traits

__all__ = ["check_logits", "check_target"]

NUM_TOKENS = 8
# Of the largest logit: a scale, a cap or a bias that is missed shows as some tenths of it.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}


@torch.no_grad()
def check_target(target: Any) -> None:
    """Refuse a target whose features or logits are not those that a drafter is made for.

    Args:
        target: A whole target, with its decoder layers, in evaluation mode.

    Raises:
        TargetError: Its layers do not give one row of its width for a token, or its logits are
            not its head's output as its family's traits have it.
    """
    if not _runs_here(target.model):
        return
    ids_1T = _tokens(target.model)
    found = tuple(target.features(ids_1T).shape)
    expected = (1, NUM_TOKENS, len(target.layer_ids) * target.hidden_size)
    if found != expected:
        raise TargetError(
            f"the layers of this '{target.model.config.model_type}' target give features of shape "
            f"{found} for {NUM_TOKENS} tokens, and a drafter reads {expected}; set target.path to "
            "a model whose layers give one row for a token"
        )

    def read(ids_1T: Tensor) -> Tensor:
        final_1TD = target.decoder(input_ids=ids_1T, use_cache=False).last_hidden_state
        traits = target_traits(target.model.config.get_text_config())
        return traits.logits(F.linear(final_1TD[0, :-1], target.lm_head.weight))

    check_logits(target.model, read)


@torch.no_grad()
def check_logits(model: Any, read: Callable[[Tensor], Tensor]) -> None:
    """Refuse a model whose own forward gives other logits than ``read`` takes it to give.

    Args:
        model: A transformers model in evaluation mode.
        read: Logits of all but the last of token ids (1, T) as they are computed elsewhere,
            shape (T - 1, V).

    Raises:
        TargetError: They differ.
    """
    if not _runs_here(model):
        return
    ids_1T = _tokens(model)
    own = model(input_ids=ids_1T, use_cache=False).logits[0, :-1].float()
    ours = read(ids_1T).float()
    same_shape = own.shape == ours.shape
    error = float((ours - own).abs().max() / own.abs().max()) if same_shape else torch.inf
    if not error <= TOLERANCE.get(model.get_input_embeddings().weight.dtype, 0.05):
        kind = model.config.get_text_config().model_type
        raise TargetError(
            f"the logits of this '{kind}' target differ by {error:.2g} of the largest from its "
            "head's output as the family is known here, so a drafter would be trained on others; "
            "set target.path to a model of another family"
        )


def _tokens(model: Any) -> Tensor:
    embedding_VD = model.get_input_embeddings().weight
    return (torch.arange(NUM_TOKENS, device=embedding_VD.device) * 7 % len(embedding_VD))[None]


def _runs_here(model: Any) -> bool:
    """Whether the model's weights are there, on a device that its attention has a kernel for."""
    on_cpu = model.get_input_embeddings().weight.device.type == "cpu"
    flash = str(model.config._attn_implementation).startswith("flash")
    return not (on_cpu and flash) and not any(weight.is_meta for weight in model.parameters())
