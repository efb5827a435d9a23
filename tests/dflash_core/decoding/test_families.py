"""Targets of other families: a drafter is built from each, and decoding stays the target's own."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dflash_core.decoding.plain import generate
from dflash_core.decoding.speculative import speculative_generate
from dflash_core.errors import TargetError
from tests.dflash_core.draft.parts import MASK, SIZES, SmallTarget, small_drafter

SHAPE = {
    **SIZES,
    "initializer_range": 0.1,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "bos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama": {"rope_parameters": LLAMA3},
    "qwen2": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "qwen3": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "use_sliding_window": True,
        "sliding_window": 7,
    },
    "gemma2": {"query_pre_attn_scalar": 8, "sliding_window": 7, "final_logit_softcapping": 5.0},
    "gemma3_text": {"query_pre_attn_scalar": 8, "sliding_window": 7},
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param, _family(request.param, FAMILIES[request.param])


def test_decoding_is_the_targets_own(family):
    name, target = family
    drafter = small_drafter(target).eval()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, MASK, length) for length in (9, 14)]
    plain = generate(target, prompts, max_new_tokens=12)
    for batch_size in (1, 2):
        drafted = speculative_generate(
            target, drafter, prompts, max_new_tokens=12, batch_size=batch_size
        )
        assert [d.token_ids.tolist() for d in drafted] == [text.tolist() for text in plain]
    with torch.inference_mode():
        ids = np.concatenate([prompts[1], plain[1][:-1]])
        logits = target.model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0]
    assert logits[len(prompts[1]) - 1 :].argmax(-1).tolist() == plain[1].tolist(), name


def test_a_window_is_not_narrowed_by_what_other_rows_refused(family):
    name, target = family
    if getattr(target.model.config, "sliding_window", None) is None:
        pytest.skip(f"{name} attends to everything")
    drafter = small_drafter(target).eval()
    rng = np.random.default_rng(1)
    prompts = [rng.integers(2, MASK, length) for length in (9, 14, 5, 11, 7, 12)]
    plain = generate(target, prompts, max_new_tokens=40, batch_size=1, stop_token_ids=())
    together = generate(target, prompts, max_new_tokens=40, batch_size=6, stop_token_ids=())
    assert [text.tolist() for text in together] == [text.tolist() for text in plain]
    drafted = speculative_generate(
        target, drafter, prompts, max_new_tokens=40, batch_size=6, stop_token_ids=()
    )
    assert [d.token_ids.tolist() for d in drafted] == [text.tolist() for text in plain]


LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
MAMBA = {"mamba_d_state": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
HYBRIDS = {
    "qwen3_5_text": LINEAR,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mamba", "moe"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "falcon_h1": MAMBA | {"mamba_d_ssm": 32, "mamba_n_heads": 4},
    "inkling_text": {"sliding_window": 7},
}


def _family(name, settings):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SHAPE, **settings)
    return SmallTarget(AutoModelForCausalLM.from_config(config).eval().requires_grad_(False))


@pytest.mark.parametrize("name", HYBRIDS)
def test_running_states_are_put_back_where_drafts_are_refused(name):
    """Against the target without a cache, alone and side by side."""
    target = _family(name, HYBRIDS[name])
    prompts = [list(range(first, first + length)) for first, length in ((2, 9), (20, 3))]
    own = [_without_cache(target, prompt) for prompt in prompts]
    settings = {"max_new_tokens": 8, "stop_token_ids": ()}
    assert [text.tolist() for text in generate(target, prompts, **settings)] == own
    drafted = speculative_generate(target, small_drafter(target).eval(), prompts, **settings)
    assert [text.token_ids.tolist() for text in drafted] == own
    assert max(len(text.acceptance_lengths) for text in drafted) > 4, "nothing was refused"
    with pytest.raises(TargetError, match=r"running states.*set evaluation\.batch_sizes to 1"):
        speculative_generate(target, small_drafter(target), prompts, batch_size=2, **settings)


def test_states_that_padding_would_change_are_grouped_by_length():
    target = _family("deepseek_v4", {"sliding_window": 7})
    prompts = [list(range(first, first + length)) for first, length in ((2, 9), (20, 3), (40, 9))]
    texts = generate(target, prompts, max_new_tokens=8, stop_token_ids=())
    assert [text.tolist() for text in texts] == [_without_cache(target, p) for p in prompts]


def test_a_cache_of_the_targets_own_kind_is_refused():
    target = _family("minimax", {"layer_types": ["linear_attention", "full_attention"] * 2})
    with pytest.raises(TargetError, match="'minimax' keeps a cache of its own kind"):
        generate(target, [[3, 4]], max_new_tokens=2)


def _without_cache(target, prompt):
    ids = [int(token) for token in prompt]
    for _ in range(8):
        with torch.inference_mode():
            logits = target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def test_cap_and_rope_come_from_the_target(family):
    name, target = family
    spec = small_drafter(target).spec
    assert spec.input_embedding_scale == 1.0  # the raw rows, which most engines serve
    assert spec.final_logit_softcapping == (5.0 if name == "gemma2" else None)
    assert spec.rope_parameters["rope_type"] == ("llama3" if name == "llama" else "default")


def test_first_slot_logits_are_read_as_the_target_reads_its_own(family):
    """The drafter's logits of the target's own final hidden state are the target's logits."""
    _, target = family
    drafter = small_drafter(target)
    ids = torch.arange(2, 12)[None]
    with torch.inference_mode():
        hidden = target.model.get_decoder()(input_ids=ids).last_hidden_state
        ours = drafter.scale_logits(hidden @ target.lm_head.weight.T)
        torch.testing.assert_close(ours, target.model(input_ids=ids).logits)
