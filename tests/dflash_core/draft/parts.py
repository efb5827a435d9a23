"""Small parts that the drafter's tests share: a random target, documents, a micro-batch."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_core.corpus.store import Sample
from dflash_core.draft.batch import collate
from dflash_core.draft.build import build_drafter
from dflash_core.draft.config import DraftConfig
from dflash_core.planning.anchors import AnchorConfig

VOCABULARY = 97
MASK = 96
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


@dataclass
class SmallTarget:
    """The members of a target that a drafter reads, without a folder."""

    model: Any
    layer_ids: tuple[int, ...] = (0, 2)
    tokenizer: Any = None

    @property
    def input_embeddings(self):
        return self.model.get_input_embeddings()

    @property
    def lm_head(self):
        return self.model.get_output_embeddings()


def small_target(*, seed=0, layer_ids=(0, 2), **overrides) -> SmallTarget:
    torch.manual_seed(seed)
    values = {
        **SIZES,
        "initializer_range": 0.1,
        "max_position_embeddings": 512,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**values | overrides)).eval().requires_grad_(False)
    return SmallTarget(model, tuple(layer_ids))


def small_drafter(target, *, double=False, draft_token_ids=None, **overrides):
    values = {"num_layers": 2, "block_size": 4, "mask_token_id": MASK}
    model = build_drafter(
        DraftConfig(**values | overrides), target, seed=1, draft_token_ids=draft_token_ids
    )
    # Norms away from 1 and a louder output, so that no factor can hide.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.rand_like(parameter))
    return model.double() if double else model


def document(length, *, prompt=5, seed=0, gaps=(), name=None) -> Sample:
    rng = np.random.default_rng([seed, length])
    mask = np.arange(length) >= prompt
    mask[list(gaps)] = False
    ids = rng.integers(2, MASK, length).astype(np.int32)
    return Sample(ids, mask, "test", name or f"sample-{seed}-{length}")


def batch_of(rows, *, padded_length=None, block_size=4, epoch=0, distils=False, **anchor_settings):
    longest = max(sum(len(s.input_ids) for s in row) for row in rows)
    settings = {"anchors_per_supervised_token": 0.5, "min_anchors": 2} | anchor_settings
    return collate(
        rows,
        padded_length=padded_length or longest,
        block_size=block_size,
        mask_token_id=MASK,
        anchors=AnchorConfig(**settings),
        seed=7,
        epoch=epoch,
        distils=distils,
    )


def random_features(batch, spec, *, seed=0, dtype=torch.float32):
    """Features that depend on the document and the position only, as a causal target's would."""
    rows, width = batch.input_ids_BT.shape
    features = torch.zeros(rows, width, spec.feature_size, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(VOCABULARY, spec.feature_size, generator=generator, dtype=dtype)
    real = batch.attention_mask_BT
    features[real] = table[batch.input_ids_BT[real]]
    features[real] += torch.sin(batch.position_ids_BT[real].to(dtype))[:, None]
    return features


def kept(batch, features_BTF):
    """The rows of the tokens that the batch keeps, as the loss takes them."""
    return features_BTF.flatten(0, 1)[batch.context_index_M]
