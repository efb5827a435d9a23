"""Against PyPI speculators 0.9.0, which needs an environment of its own; skipped elsewhere.

Last run on 2026-12-01 with speculators 0.9.0, torch 2.13.0, transformers 5.24.0: all passed.
speculators pins transformers to 5.19 or older, which this project's decoding does not run on, so it
is installed without its pins: in a copy of this project's environment
``pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0`` and ``pip install datasets``, then
``python -m pytest -c /dev/null --rootdir . tests/dflash_core/export/test_speculators.py``: the
project's own warning filters name packages that may not be there.
"""

import numpy as np
import pytest
import torch

from dflash_core.draft.loss import draft_hidden
from dflash_core.export.write import export_drafter
from tests.dflash_core.draft.parts import (
    VOCABULARY,
    batch_of,
    document,
    kept,
    random_features,
    small_drafter,
    small_target,
)

speculators = pytest.importorskip("speculators", reason="needs speculators in its own environment")

IDS = np.arange(1, 97, 3)
SHAPES = {
    "full": {},
    "reduced": {"draft_vocab_size": len(IDS), "draft_token_ids": IDS},
    "sliding": {"layer_types": ("sliding_attention", "sliding_attention"), "sliding_window": 64},
    "open": {
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 64,
        "is_causal": False,
    },
}


@pytest.fixture(scope="module", params=SHAPES)
def pair(request, tmp_path_factory):
    """Our drafter with its target, and their class, loaded from our export."""
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig

    root = tmp_path_factory.mktemp("pair")
    target = small_target()
    target.model.save_pretrained(root / "target")
    target.model.config.name_or_path = str(root / "target")
    ours = small_drafter(target, **SHAPES[request.param]).eval()
    out = export_drafter(
        ours, root / "drafter", layout="speculators", target=target, dtype=torch.float32
    )
    config = DFlashSpeculatorConfig.from_pretrained(out)
    config.transformer_layer_config._attn_implementation = "eager"  # theirs is flex, for GPUs
    theirs, info = DFlashDraftModel.from_pretrained(out, config=config, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return ours, theirs.eval(), target


def test_every_tensor_and_setting_is_read(pair):
    ours, theirs, target = pair
    state = theirs.state_dict()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(state[name], tensor)
    assert torch.equal(theirs.embed_tokens.weight, target.input_embeddings.weight)
    assert torch.equal(theirs.lm_head.weight, ours.head_weight(target.lm_head.weight))
    assert theirs.target_layer_ids == [layer + 1 for layer in ours.spec.target_layer_ids]
    assert (theirs.block_size, theirs.mask_token_id) == (4, ours.spec.mask_token_id)
    if ours.draft_token_ids is not None:
        assert torch.equal(theirs.d2t + torch.arange(len(IDS)), ours.draft_token_ids)
        assert torch.equal(theirs.t2d.nonzero()[:, 0], ours.draft_token_ids)


def test_logits_of_every_block_are_theirs(pair):
    """One document, every anchor that both take: 1e-4 in float32, from another order of sums."""
    ours, theirs, target = pair
    batch = batch_of([[document(24)]], anchors_per_supervised_token=1.0)
    features = random_features(batch, ours.spec)
    with torch.no_grad():
        hidden = draft_hidden(ours, target.input_embeddings.weight, kept(batch, features), batch)
        found = hidden @ ours.head_weight(target.lm_head.weight).T
        num_theirs = 24 - 4 - 5  # they take no anchor in the last block's width
        _, expected, *_ = theirs._backbone_forward(
            features,
            batch.input_ids_BT,
            batch.loss_mask_BT,
            torch.zeros(1, 24, ours.spec.hidden_size),
            batch.document_ids_BT,
            max_anchors=num_theirs,
        )
    expected = expected.view(num_theirs, 4, ours.spec.draft_vocab_size or VOCABULARY)
    torch.testing.assert_close(found[:num_theirs], expected, atol=1e-4, rtol=1e-4)
