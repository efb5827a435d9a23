"""Targets of many families: logits and features are what a drafter is made for, or refused."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash_core.draft.build import build_drafter
from dflash_core.draft.config import DraftConfig
from dflash_core.errors import TargetError
from dflash_core.target.check import check_target
from dflash_core.target.families import LENGTH_DEPENDENT, target_traits
from dflash_core.target.loading import Target
from dflash_core.target.rope import freeze_rope
from dflash_core.training.objectives.target import _NextToken
from tests.dflash_core.draft.parts import MASK, SIZES

SHAPE = {
    **SIZES,
    "initializer_range": 0.3,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 4.0}
GEMMA = {"query_pre_attn_scalar": 8, "sliding_window": 7}
LAYERS = ["sliding_attention", "full_attention"] * 2
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
GEMMA3N = {
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
    "laurel_rank": 4,
    "num_kv_shared_layers": 0,
    "layer_types": LAYERS,
    "intermediate_size": [48] * 4,
    "activation_sparsity_pattern": [0.0] * 4,
    "sliding_window": 7,
}
AFMOE = {
    "mup_enabled": True,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "num_dense_layers": 1,
    "sliding_window": 7,
}
FALCON = {
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.3,
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
KNOWN = {
    "qwen3": {},
    "gemma2": GEMMA | {"final_logit_softcapping": 5.0},
    "vaultgemma": GEMMA | {"final_logit_softcapping": 5.0},
    "gemma3_text": GEMMA,
    "granite": GRANITE,
    "granitemoe": GRANITE | {"num_local_experts": 4},
    "cohere": {"logit_scale": 0.25},
    "hyperclovax": GRANITE,
    "minicpm3": {"scale_emb": 12, "dim_model_base": 8} | LATENT,
    "afmoe": AFMOE,
    "falcon_h1": FALCON,
    "nanochat": {"final_logit_softcapping": 5.0},
    "phi3": {},
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 3,
    "long_factor": [1.0, 4.0, 9.0],
    "partial_rotary_factor": 0.75,  # as Phi-4-mini
}
LENGTH_DEPENDENT_TARGETS = {
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
    "qwen3": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
}


def family(name, **values):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SHAPE | values)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    return Target(model, None, (0, 2))


@pytest.mark.parametrize("name", KNOWN)
def test_what_a_family_does_around_its_layers_is_known(name):
    target = family(name, **KNOWN[name])
    check_target(target)
    traits = target_traits(target.model.config.get_text_config())
    ids_1T = torch.arange(2, 14)[None]
    entered = []
    target.decoder.layers[0].register_forward_pre_hook(
        lambda module, given, named: entered.append(given[0] if given else named["hidden_states"]),
        with_kwargs=True,
    )
    labels_1T = ids_1T.clone()
    labels_1T[:, 0] = -100
    own = float(target.model(input_ids=ids_1T, labels=labels_1T).loss)
    logits = _NextToken(target.model)(ids_1T, torch.ones_like(ids_1T[:, 1:]) > 0, None)
    assert float(F.cross_entropy(logits, ids_1T[0, 1:])) == pytest.approx(own, rel=1e-5)
    if name != "nanochat":  # it norms the rows
        scaled = target.input_embeddings.weight[ids_1T] * traits.embedding_scale
        torch.testing.assert_close(entered[0], scaled)


@pytest.mark.parametrize(
    ("name", "values", "sentence"),
    [
        ("gemma3n_text", GEMMA3N, r"layers of this 'gemma3n_text' target give features of shape"),
        ("phi", {}, r"logits of this 'phi' target differ by .*head's output.*target\.path"),
    ],
)
def test_a_family_that_does_something_else_is_refused(name, values, sentence):
    target = family(name, **values)
    if target.lm_head.bias is not None:
        torch.nn.init.normal_(target.lm_head.bias)
    with pytest.raises(TargetError, match=sentence):
        check_target(target)


def test_the_kinds_of_rope_that_follow_the_longest_position_are_known():
    rope = LONGROPE | {"partial_rotary_factor": 1.0, "short_factor": [1.0] * 4, "factor": 4.0}
    rope |= {"long_factor": [2.0] * 4, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for kind, function in ROPE_INIT_FUNCTIONS.items():
        values = SHAPE | {"rope_parameters": rope | {"rope_type": kind}}
        config = AutoConfig.for_model("qwen3", **values)
        short, long = (function(config, None, seq_len=length)[0] for length in (8, 1024))
        assert torch.equal(short, long) == (kind not in LENGTH_DEPENDENT), kind


@pytest.mark.parametrize("name", LENGTH_DEPENDENT_TARGETS)
def test_no_feature_depends_on_the_neighbour_in_the_batch(name):
    target = family(name, **LENGTH_DEPENDENT_TARGETS[name])
    ids_2T = torch.arange(2, 26)[None].repeat(2, 1)
    alone = target.features(ids_2T[:1, :12])
    far_2T = torch.arange(24) + torch.tensor([[0], [100]])
    beside = target.features(ids_2T, position_ids_BT=far_2T)[:1, :12]
    again = target.features(ids_2T[:1, :12])
    torch.testing.assert_close(beside, alone, rtol=1e-4, atol=1e-4)
    assert torch.equal(again, alone)


@pytest.mark.parametrize("name", LENGTH_DEPENDENT_TARGETS)
def test_their_drafter_has_plain_rope_that_every_engine_computes_alike(name):
    target = family(name, **LENGTH_DEPENDENT_TARGETS[name])
    spec = build_drafter(DraftConfig(num_layers=1, mask_token_id=MASK), target).spec
    assert spec.rope_parameters == {"rope_type": "default", "rope_theta": 1e4}


def test_rope_that_is_not_computed_by_transformers_cannot_be_held():
    values = LENGTH_DEPENDENT_TARGETS["qwen3"]
    config = AutoConfig.for_model("qwen3", **SHAPE | values)
    own_code = SimpleNamespace(config=config, modules=lambda: [torch.nn.Linear(2, 2)])
    with pytest.raises(TargetError, match=r"rope_type 'dynamic' .*target\.trust_remote_code"):
        freeze_rope(own_code)
