"""The table of engines, row by row: what each makes of what is written."""

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from dflash_core.export.engines import ENGINES, Served, judge, served, trained
from dflash_core.export.write import drafter_config
from tests.dflash_core.draft.parts import SIZES, SmallTarget, small_drafter, small_target

SLIDING = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 64}
MIXED = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 64}
OPEN = {"is_causal": False}
BY_NAME = {engine.name: engine for engine in ENGINES}
VLLM, SGLANG, TENSORRT, AUTHORS, MLX, TRANSFORMERS = BY_NAME


@pytest.fixture(scope="module")
def target():
    return small_target()


def written(target, layout, shape, *, dtype=torch.bfloat16, **changes):
    spec = small_drafter(target, **shape).spec.model_copy(update=changes)
    return spec, drafter_config(spec, layout, dtype, target)


@pytest.mark.parametrize(
    ("engine", "layout", "shape", "wrong"),
    [
        (VLLM, "zlab", {}, {}),
        (VLLM, "zlab", SLIDING, {}),
        (VLLM, "zlab", MIXED, {}),
        (VLLM, "speculators", {}, {}),
        (VLLM, "speculators", SLIDING, {}),
        (VLLM, "speculators", MIXED | OPEN, {}),
        (VLLM, "transformers", SLIDING | OPEN, {}),
        (VLLM, "transformers", MIXED | OPEN, {"windows": (63, None)}),
        (SGLANG, "zlab", {}, {}),
        (SGLANG, "zlab", MIXED, {}),
        (SGLANG, "zlab", SLIDING | OPEN, {}),
        (SGLANG, "transformers", SLIDING | OPEN, {"windows": (63, 63)}),
        (TENSORRT, "zlab", {}, {}),
        (TENSORRT, "zlab", MIXED, {}),
        (TENSORRT, "zlab", MIXED | OPEN, {"causal": (True, False)}),
        (TENSORRT, "zlab", {"is_causal": True}, {"causal": (False, False)}),
        (AUTHORS, "zlab", MIXED, {}),
        (AUTHORS, "zlab", SLIDING | OPEN, {}),
        (MLX, "zlab", MIXED, {}),
        (TRANSFORMERS, "transformers", {}, {}),
        (TRANSFORMERS, "transformers", MIXED | OPEN, {}),
    ],
)
def test_an_engine_serves_what_was_trained_but_for(target, engine, layout, shape, wrong):
    spec, config = written(target, layout, shape)
    expected = vars(trained(spec, "bfloat16")) | wrong
    found = served(BY_NAME[engine], config)
    if layout != "speculators" and engine == VLLM:
        expected["block_size"] = None  # num_speculative_tokens says it
    assert found == Served(**expected)


@pytest.mark.parametrize(
    ("engine", "layout", "scale"),
    [
        (VLLM, "zlab", 1.0),
        (SGLANG, "zlab", 8.0),
        (TENSORRT, "zlab", 8.0),
        (AUTHORS, "zlab", 2.0),
        (MLX, "zlab", 16.0),
        (TRANSFORMERS, "transformers", 8.0),
    ],
)
def test_embedding_rows_are_scaled_by_module_field_both_or_neither(target, engine, layout, scale):
    _, config = written(target, layout, {}, input_embedding_scale=2.0)
    assert served(BY_NAME[engine], config, module_scale=8.0).embedding_scale == scale


@pytest.mark.parametrize(
    ("engine", "changes", "field", "value"),
    [
        (VLLM, {"is_causal": None, "dflash_config": {"causal": True}}, "causal", (True, True)),
        (VLLM, {"dflash_config": {"use_swa": True, "swa_window_size": 9}}, "windows", (9, 9)),
        (SGLANG, {"is_causal": None, "dflash_config": {"causal": True}}, "causal", (False, False)),
        (SGLANG, {"dtype": "float32"}, "dtype", "float16"),
        (SGLANG, {"block_size": 7}, "block_size", 7),
        (TENSORRT, {"dtype": "float32"}, "dtype", "float32"),
        (TENSORRT, {"mask_token_id": None}, "mask_token_id", 97),
        (TENSORRT, {"target_layer_ids": [1]}, "layer_ids", ()),
        (TENSORRT, {"rope_theta": 5.0}, "rope", {"rope_type": "default", "rope_theta": 5.0}),
        (AUTHORS, {"dflash_config": {"mask_token_id": 3}}, "mask_token_id", 3),
        (MLX, {"mask_token_id": 3}, "mask_token_id", None),
        (TRANSFORMERS, {"dflash_config": {"target_layer_ids": [1]}}, "layer_ids", (0, 2)),
    ],
)
def test_where_an_engine_looks_for_a_field(target, engine, changes, field, value):
    """Configs of other trainers: here dflash_config holds nothing that is not named."""
    _, config = written(target, "zlab", {})
    config = {**config, "dflash_config": {}} | changes
    assert getattr(served(BY_NAME[engine], config), field) == value


def test_the_speculators_flag_is_causality_of_every_layer_in_vllm(target):
    spec, config = written(target, "speculators", {})
    assert config["sliding_window_non_causal"] is True
    config["sliding_window_non_causal"] = False
    (vllm, *_) = judge(spec, config, "speculators", target)
    assert vllm.wrong == (
        "causality inside the block, by layer (true, true) instead of (false, false)",
    )


def test_engines_that_know_neither_target_nor_layout_say_so():
    target = SmallTarget(Qwen2ForCausalLM(Qwen2Config(**SIZES)).eval().requires_grad_(False))
    spec, config = written(target, "zlab", {})
    said = {verdict.engine: verdict.refuses for verdict in judge(spec, config, "zlab", target)}
    assert said[VLLM] is None
    assert said[SGLANG] == "has no hidden states of Qwen2ForCausalLM targets for drafters"
    assert said[TRANSFORMERS] == "reads transformers, not zlab"
