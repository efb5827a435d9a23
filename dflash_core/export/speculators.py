"""The speculators layout: self-contained, with embedding and head of the draft vocabulary.

Layer ids count hidden states, of which index 0 is the embedding: one more than in z-lab's
``target_layer_ids``. ``d2t`` holds, for each drafted id, the distance to its target id, and
``t2d`` which target ids can be drafted.
"""

from typing import Any

import torch
from torch import Tensor

from dflash_core.decoding.speculative import check_pair
from dflash_core.draft.build import TargetLike
from dflash_core.draft.model import DraftModel
from dflash_core.draft.spec import DraftSpec
from dflash_core.errors import DraftError
from dflash_core.export.zlab import zlab_config

__all__ = ["speculators_config", "speculators_tensors"]

OUTSIDE_LAYER = {  # of z-lab's fields; the layout says them in its own way
    *("architectures", "block_size", "dflash_config", "num_target_layers", "is_causal"),
    *("mask_token_id", "target_layer_ids"),
}


def speculators_config(spec: DraftSpec, target: TargetLike, dtype: torch.dtype) -> dict[str, Any]:
    """Return the content of ``config.json``.

    Raises:
        DraftError: The drafter has a trait that the layout has no field for.
    """
    _check_traits(spec)
    layer = zlab_config(spec, dtype)
    for key in OUTSIDE_LAYER:
        layer.pop(key, None)
    model_config = target.model.config
    return {
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in spec.target_layer_ids],
        "block_size": spec.block_size,
        "draft_vocab_size": spec.draft_vocab_size or spec.vocab_size,
        "dtype": str(dtype).removeprefix("torch."),
        "mask_token_id": spec.mask_token_id,
        "sample_from_anchor": False,
        # vLLM takes it for full-attention layers too (`dflash_core.export.engines`).
        "sliding_window_non_causal": not spec.is_causal,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": spec.block_size - 1}
            ],
            "verifier": {
                "name_or_path": str(model_config.name_or_path),
                "architectures": list(model_config.architectures or []),
            },
        },
        "speculators_model_type": "dflash",
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
    }


def _check_traits(spec: DraftSpec) -> None:
    traits = {
        "layers of differing causality": spec.is_causal is None,
        "causal full-attention layers": bool(spec.is_causal)
        and "full_attention" in spec.layer_types,
        "input_embedding_scale": spec.input_embedding_scale != 1.0,
        "output_multiplier": spec.output_multiplier != 1.0,
        "final_logit_softcapping": spec.final_logit_softcapping is not None,
    }
    for trait, present in traits.items():
        if present:
            raise DraftError(
                f"the speculators layout has no field for {trait}; export in the zlab layout"
            )


def speculators_tensors(drafter: DraftModel, target: TargetLike) -> dict[str, Tensor]:
    """Return every tensor of the layout."""
    check_pair(target, drafter)
    tensors: dict[str, Tensor] = dict(drafter.state_dict())
    tensors["embed_tokens.weight"] = target.input_embeddings.weight
    tensors["lm_head.weight"] = drafter.head_weight(target.lm_head.weight)
    ids = drafter.draft_token_ids
    if ids is not None:
        tensors["d2t"] = ids - torch.arange(len(ids), device=ids.device)
        known = torch.zeros(drafter.spec.vocab_size, dtype=torch.bool, device=ids.device)
        tensors["t2d"] = known.index_fill(0, ids, True)
    return tensors
