"""The transformers layout: what ``target.generate(..., assistant_model=drafter)`` decodes with.

transformers 5.24 decodes block drafters by itself (``speculation_type="dflash"``); its one class
for them, ``MuseGlimmerAssistantModel``, is the plain DFlash function under two other tensor names
(transformers/models/muse_glimmer_assistant/modular_muse_glimmer_assistant.py). vLLM and SGLang
know the names too.
"""

from typing import Any

import torch
from torch import Tensor

from dflash_core.draft.model import DraftModel
from dflash_core.draft.spec import DraftSpec
from dflash_core.errors import DraftError
from dflash_core.export.zlab import zlab_config

__all__ = ["transformers_config", "transformers_tensors"]

RENAMED = {
    "fc.weight": "encoder.fc.weight",
    "hidden_norm.weight": "encoder.output_norm_enc.weight",
}
LEAST_WINDOW = 3  # with a narrower one transformers' cache keeps everything


def transformers_config(spec: DraftSpec, dtype: torch.dtype) -> dict[str, Any]:
    """Return the content of ``config.json``.

    Raises:
        DraftError: The drafter has a trait that the class does not compute.
    """
    layers = range(spec.num_layers)
    windows = [window for window in map(spec.window, layers) if window is not None]
    traits = {
        "layers that are causal in their block": any(map(spec.causal, layers)),
        "attention_bias": spec.attention_bias,
        f"sliding_window {spec.sliding_window}": min(windows, default=LEAST_WINDOW) < LEAST_WINDOW,
    }
    for trait, present in traits.items():
        if present:
            raise DraftError(
                f"the transformers layout has no field for {trait}; export in the zlab layout"
            )
    config = zlab_config(spec, dtype)
    del config["sliding_window"]  # a number there, or not at all
    if windows:
        # Its mask keeps distances up to the window (masking_utils.py,
        # sliding_window_bidirectional_overlay), where others count the own position.
        config["sliding_window"] = windows[0] - 1
    return config | {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
    }


def transformers_tensors(drafter: DraftModel) -> dict[str, Tensor]:
    """Return every tensor of the layout."""
    return {RENAMED.get(name, name): tensor for name, tensor in drafter.state_dict().items()}
