"""The mask against nested loops; sliced and flex attention against the dense mask."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import flex_attention as torch_flex
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dflash_core.draft import flex
from dflash_core.draft.attention import SlicedAttention, dense_mask
from dflash_core.draft.config import LossConfig
from dflash_core.draft.flex import FlexAttention
from dflash_core.draft.loss import draft_loss
from tests.dflash_core.draft.parts import (
    batch_of,
    document,
    kept,
    random_features,
    small_drafter,
    small_target,
)

ROWS = [
    [document(40, seed=1), document(9, prompt=2, seed=2)],
    [document(61, seed=3, gaps=(30, 31))],
    [document(12, seed=4), document(3, prompt=3, seed=5), document(25, prompt=1, seed=6)],
]


def mask_by_loops(batch, spec, layer):
    """The definition once more, cell by cell, from the batch's plain columns only."""
    size = spec.block_size
    documents = batch.document_ids_BT.flatten().tolist()
    positions = batch.position_ids_BT.flatten().tolist()
    width = batch.input_ids_BT.shape[1]
    context = batch.context_index_M.tolist()
    rows, columns = batch.anchor_rows_N.tolist(), batch.anchor_columns_N.tolist()
    anchors = [row * width + column for row, column in zip(rows, columns, strict=True)]
    seen = torch.zeros(len(anchors) * size, len(context) + len(anchors) * size, dtype=torch.bool)
    for n, anchor in enumerate(anchors):
        for slot in range(size):
            query = positions[anchor] + slot
            for m, token in enumerate(context):
                near = spec.window(layer) is None or query - positions[token] < spec.window(layer)
                before = positions[token] < positions[anchor]
                same = documents[token] == documents[anchor]
                seen[n * size + slot, m] = near and before and same
            for other in range(size):
                ahead = other > slot and spec.causal(layer)
                far = spec.window(layer) is not None and abs(slot - other) >= spec.window(layer)
                seen[n * size + slot, len(context) + n * size + other] = not (ahead or far)
    return seen


def random_leaves(batch):
    """Queries, keys and values of blocks and context, in double precision, with gradients."""
    n, m = batch.num_anchors, len(batch.context_index_M)
    torch.manual_seed(0)
    shapes = [(n, 4, 4, 8), (n, 4, 2, 8), (n, 4, 2, 8), (m, 2, 8), (m, 2, 8)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def assert_same(found, expected, leaves):
    """Value and gradient of two forms: only the order of sums differs."""
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
    upstream = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad(form, leaves, upstream) for form in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-10)


@pytest.fixture(scope="module")
def drafter():
    return small_drafter(
        small_target(),
        num_layers=3,
        layer_types=("full_attention", "sliding_attention", "full_attention"),
        sliding_window=6,
    )


@pytest.mark.parametrize("layer", [0, 1])
def test_dense_mask_is_the_definition(drafter, layer):
    batch = batch_of(ROWS, padded_length=70)
    assert torch.equal(
        dense_mask(batch, drafter.spec, layer), mask_by_loops(batch, drafter.spec, layer)
    )


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("density", [0.1, 1.0])
def test_sliced_attention_equals_the_dense_mask(drafter, layer, density):
    """Value and gradient in double precision."""
    batch = batch_of(ROWS, padded_length=70, anchors_per_supervised_token=density)
    leaves = random_leaves(batch)
    query, key, value, context_key, context_value = leaves
    found = SlicedAttention(batch, drafter.spec)(
        query, (key, value), (context_key, context_value), layer
    )
    keys = torch.cat([context_key, key.flatten(0, 1)]).repeat_interleave(2, dim=1)
    values = torch.cat([context_value, value.flatten(0, 1)]).repeat_interleave(2, dim=1)
    dense = F.scaled_dot_product_attention(
        query.flatten(0, 1).transpose(0, 1),
        keys.transpose(0, 1),
        values.transpose(0, 1),
        attn_mask=dense_mask(batch, drafter.spec, layer),
    )
    dense = dense.transpose(0, 1).unflatten(0, query.shape[:2])
    assert_same(found, dense, leaves)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_flex_attention_equals_the_sliced_one(drafter, layer, monkeypatch):
    """Value and gradient in double precision, by the operator's plain form.

    Torch refuses a gradient on a CPU because no kernel is compiled for it; the plain one is exact.
    """
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    batch = batch_of(ROWS, padded_length=70)
    leaves = random_leaves(batch)
    found, expected = (
        attend(batch, drafter.spec)(
            leaves[0], (leaves[1], leaves[2]), (leaves[3], leaves[4]), layer
        )
        for attend in (FlexAttention, SlicedAttention)
    )
    assert_same(found, expected, leaves)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("tile", [8, 12, 16])
def test_the_tiles_that_flex_visits_cover_the_dense_mask(drafter, layer, tile, monkeypatch):
    """None is left out that holds a seen cell, none counts as whole that holds a hidden one."""
    monkeypatch.setattr(flex, "TILE", tile)
    batch = batch_of(ROWS, padded_length=70)
    dense = dense_mask(batch, drafter.spec, layer)
    pad = [-length % tile for length in dense.shape]
    cells = F.pad(dense, (0, pad[1], 0, pad[0])).unflatten(1, (-1, tile)).unflatten(0, (-1, tile))
    seen, whole = cells.any(dim=3).any(dim=1), cells.all(dim=3).all(dim=1)
    mask = FlexAttention(batch, drafter.spec)._layer_mask(layer)
    visited, taken_whole = mask.to_dense()[0, 0].bool(), whole_tiles(mask)
    assert not (seen & ~visited).any() and not (taken_whole & ~whole).any()
    if drafter.spec.window(layer) is None:
        assert torch.equal(visited, seen) and taken_whole.any()


def whole_tiles(mask):
    """The tiles without a mask function, as a matrix."""
    found = torch.zeros(mask.full_kv_indices.shape[2:], dtype=torch.bool)
    for row, count in enumerate(mask.full_kv_num_blocks[0, 0].tolist()):
        found[row, mask.full_kv_indices[0, 0, row, :count].long()] = True
    return found


class LargestTensor(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that any operator gives."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.num_bytes = max(self.num_bytes, tensor.numel() * tensor.element_size())
        return out


@pytest.mark.parametrize("density", [0.1, 0.2])
def test_flex_makes_nothing_of_the_size_of_the_mask(drafter, density):
    """Twice the anchors have nearly four times the cells, and nothing near a byte for each."""
    batch = batch_of([[document(4_000)]], anchors_per_supervised_token=density)
    slots = batch.num_anchors * drafter.spec.block_size
    cells = slots * (len(batch.context_index_M) + slots)
    with LargestTensor() as largest:
        FlexAttention(batch, drafter.spec)._layer_mask(0)
    assert 0 < largest.num_bytes < cells / 100


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_flex_and_sliced_losses_agree_on_a_gpu():
    """Value and gradient of one step; float32 kernels sum in another order."""
    target = small_target(hidden_size=64, head_dim=16)
    model = small_drafter(target).cuda()
    batch = batch_of(ROWS, padded_length=70)
    features = kept(batch, random_features(batch, model.spec)).cuda()
    weights = {
        "embedding_VD": target.input_embeddings.weight.cuda(),
        "head_VD": target.lm_head.weight.cuda(),
    }
    results = []
    for form in ("sliced", "flex"):
        loss = draft_loss(
            model, features, batch.to("cuda"), LossConfig(attention=form), **weights
        ).loss_sum
        results.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-3)
