"""Targets of other families: a drafter is built from each, and decoding stays the target's own."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dflash_core.decoding import generate, speculative_generate
from dflash_core.decoding.cache import check_decodable
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
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **SHAPE, **FAMILIES[request.param])
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    return request.param, SmallTarget(model)


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


def test_layers_that_keep_a_running_state_are_refused_before_anything_is_decoded():
    config = AutoConfig.for_model(
        "qwen3_next", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
    )
    with pytest.raises(TargetError, match="'qwen3_next' has linear_attention layers"):
        check_decodable(config)


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
