"""A new drafter's shape comes from its target; what does not fit is refused in one sentence."""

import math

import numpy as np
import pytest
import torch
import transformers
from pydantic import ValidationError
from torch import nn

from dflash_core.draft.build import build_drafter, draft_spec, frequent_tokens
from dflash_core.draft.config import DraftConfig, LossConfig
from dflash_core.draft.from_target import copied_layer_ids, norm_scale
from dflash_core.draft.loss import draft_loss
from dflash_core.errors import DraftError
from tests.dflash_core.draft.parts import (
    MASK,
    SIZES,
    VOCABULARY,
    SmallTarget,
    batch_of,
    document,
    kept,
    random_features,
    small_target,
)


def config(**overrides):
    return DraftConfig(**{"num_layers": 1, "block_size": 4, "mask_token_id": MASK} | overrides)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("loudness", [0.05, 1.0])
@pytest.mark.parametrize("initial_weights", ["random", "target"])
def test_the_first_loss_is_near_the_logarithm_of_the_vocabulary(tied, loudness, initial_weights):
    """Also where the head is loud, and where it reads the mask token's own embedding."""
    target = small_target(tie_word_embeddings=tied, initializer_range=loudness)
    with torch.no_grad():
        target.model.model.norm.weight.fill_(3.0)
    model = build_drafter(config(num_layers=2, initial_weights=initial_weights), target)
    batch = batch_of([[document(60)]])
    features = kept(batch, random_features(batch, model.spec))
    weights = {
        "embedding_VD": target.input_embeddings.weight,
        "head_VD": target.lm_head.weight,
    }
    loss = draft_loss(model, features, batch, LossConfig(), **weights)
    assert float(loss.loss_sum.detach() / loss.weight_sum) < math.log(VOCABULARY) + 2


def test_weights_are_a_function_of_the_seed():
    target = small_target()
    one, same, other = (build_drafter(config(), target, seed=s) for s in (3, 3, 4))
    assert torch.equal(one.fc.weight, same.fc.weight)
    assert not torch.equal(one.fc.weight, other.fc.weight)


def test_layers_may_begin_as_copies_of_the_targets():
    target = small_target()
    model = build_drafter(config(num_layers=2, initial_weights="target"), target)
    layers = target.model.model.layers
    for layer, source in zip(model.layers, copied_layer_ids(2, len(layers)), strict=True):
        state = layers[source].state_dict()
        assert torch.equal(layer.self_attn.q_proj.weight, state["self_attn.q_proj.weight"])
        assert torch.equal(layer.mlp.gate_proj.weight, state["mlp.gate_proj.weight"])
    features = torch.randn(3, model.fc.in_features)
    mean = features.unflatten(-1, (-1, model.spec.hidden_size)).mean(1)
    assert torch.allclose(model.fc(features), mean, atol=1e-6)


def test_layers_of_another_shape_are_not_copied():
    narrow = config(initial_weights="target", intermediate_size=8)
    with pytest.raises(DraftError, match=r"mlp\.down_proj\.weight .*draft\.initial_weights"):
        build_drafter(narrow, small_target())


def test_layers_with_more_tensors_are_not_copied():
    """Gemma's post_attention_layernorm is no norm before the MLP, as the drafter's is."""
    with pytest.raises(DraftError, match=r"feedforward_layernorm\.weight is \(32,\) .*missing"):
        build_drafter(config(initial_weights="target"), family_target("Gemma3"))


def test_the_state_has_the_published_names_and_nothing_of_the_target():
    names = set(build_drafter(config(num_layers=5), small_target()).state_dict())
    assert len(names) == 3 + 11 * 5
    assert not {name for name in names if "embed" in name or "head" in name or "rotary" in name}


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"mask_token_id": 1}, r"mask token 1 is the target's eos token.*draft\.mask_token_id"),
        ({"mask_token_id": 500}, "mask token 500 is outside the target's 97 embedding rows"),
        ({"mask_token_id": None}, r"no reserved token.*draft\.mask_token_id"),
        ({"num_key_value_heads": 3}, r"no multiple of num_key_value_heads 3"),
        ({"layer_types": ("full_attention",) * 2}, r"names 2 layers but num_layers is 1"),
        ({"layer_types": ("sliding_attention",)}, r"draft\.sliding_window"),
        ({"draft_vocab_size": 98}, "draft_vocab_size 98 is over the vocabulary of 97"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(overrides, sentence):
    with pytest.raises(DraftError, match=sentence):
        draft_spec(config(**overrides), small_target())


@pytest.mark.parametrize(
    ("layer_ids", "sentence"),
    [
        ((1, 1), "repeats a layer"),
        ((1, 4), "names layer 4"),
        ((1, 3), "layer 3, the target's last"),
    ],
)
def test_layers_that_are_no_features_are_refused(layer_ids, sentence):
    with pytest.raises(DraftError, match=rf"{sentence}.*target\.layer_ids"):
        draft_spec(config(), small_target(layer_ids=layer_ids))


def test_a_block_of_one_is_refused():
    with pytest.raises(ValidationError, match="greater than or equal to 2"):
        config(block_size=1)


def test_a_reduced_vocabulary_needs_its_ids():
    with pytest.raises(DraftError, match="needs as many distinct token ids"):
        build_drafter(config(draft_vocab_size=5), small_target())
    with pytest.raises(DraftError, match="not between 2 forced ids"):
        frequent_tokens(np.ones(10, dtype=np.int64), 1, always=(0, 1))


FAMILIES = {
    "Gemma3": {"sliding_window": 64},
    "Gemma4": {"hidden_size_per_layer_input": 0},
    "Qwen3": {},
    "Qwen3_5": {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}


def family_target(family, **overrides):
    name = f"{family}TextConfig"
    shape = getattr(transformers, name, None) or getattr(transformers, f"{family}Config")
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(
        shape(**SIZES | FAMILIES[family] | overrides)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.rand_like(parameter))
    return SmallTarget(model.bfloat16().eval().requires_grad_(False))


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_the_final_norm_multiplies_as_the_targets_does(family):
    """Whether the family keeps its norms' weights or those less 1; a factor keeps logits quiet."""
    target = family_target(family)
    norm = target.model.get_decoder().norm
    x_SD = torch.randn(5, 32)
    model = build_drafter(config(head_dim=8), target)
    ratio = model.norm(x_SD) / norm.float()(x_SD)
    assert float(ratio.std() / ratio.mean()) < 1e-5
    assert 0.01 < float(ratio.mean()) < 1.001


def test_copied_norms_multiply_as_the_targets_do():
    target = family_target("Qwen3")
    model = build_drafter(config(initial_weights="target"), target)
    source = target.model.get_decoder().layers[-1].float()
    for name, width in (("input_layernorm", 32), ("self_attn.q_norm", 8)):
        x_SD = torch.randn(5, width)
        copied = model.layers[0].get_submodule(name)(x_SD)
        assert torch.allclose(copied, source.get_submodule(name)(x_SD), atol=1e-4)


@pytest.mark.parametrize("bias", [False, True])
def test_a_norm_that_subtracts_the_mean_is_measured_too(bias):
    norm = nn.LayerNorm(32, bias=bias).bfloat16()
    for parameter in norm.parameters():
        nn.init.uniform_(parameter)
    assert torch.allclose(norm_scale(norm, 32), norm.weight.float(), rtol=1e-5)


def test_heads_of_several_widths_need_a_setting():
    with pytest.raises(DraftError, match=r"gemma4.* differ in head_dim; set draft\.head_dim"):
        draft_spec(config(), family_target("Gemma4"))
