"""The target: features against transformers' own hidden states, layers, and bad folders."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from dflash_core.errors import TargetError
from dflash_core.target.config import TargetConfig
from dflash_core.target.layers import resolve_layer_ids
from dflash_core.target.loading import load_target, target_digest
from dflash_core.training.features.source import check_packing
from tests.tiny import TINY_LAYER_IDS, tiny_family, tiny_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


def test_features_are_the_outputs_of_the_named_layers(folder: Path) -> None:
    target = load_target(TargetConfig(path=folder, layer_ids=(0, 2)))
    ids = torch.randint(4, 384, (2, 9), generator=torch.Generator().manual_seed(0))
    states = target.model(input_ids=ids, output_hidden_states=True).hidden_states
    expected = torch.cat([states[1], states[3]], dim=-1)
    assert torch.equal(target.features(ids), expected)


def test_padding_changes_no_feature_of_a_real_token(folder: Path) -> None:
    target = load_target(TargetConfig(path=folder, layer_ids=TINY_LAYER_IDS))
    ids = torch.randint(4, 384, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, 7:] = False
    together = target.features(ids, mask)[0, :7]
    alone = target.features(ids[:1, :7])[0]
    # Sums of 32 float32 products in another order: a few units in the last place.
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_no_hook_stays_behind(folder: Path) -> None:
    target = load_target(TargetConfig(path=folder, layer_ids=TINY_LAYER_IDS))
    target.features(torch.tensor([[5, 6]]))
    assert not any(layer._forward_hooks for layer in target.decoder.layers)
    assert not any(parameter.requires_grad for parameter in target.model.parameters())


@pytest.mark.parametrize(
    ("num_layers", "expected"), [(36, (1, 9, 17, 25, 33)), (64, (1, 16, 31, 46, 61))]
)
def test_published_rule(num_layers: int, expected: tuple[int, ...]) -> None:
    assert resolve_layer_ids(num_layers, 5) == expected
    assert resolve_layer_ids(num_layers, 1) == (num_layers // 2,)


@pytest.mark.parametrize(
    ("layer_ids", "words"),
    [
        (None, "repeats a layer; set target.layer_ids"),
        ((0, 0), "repeats a layer"),
        ((0, 4), r"names layer 4, but the target has layers 0\.\.3"),
        ((-1,), "names layer -1"),
        ((0, 3), r"layer 3, the target's last, .*set target\.layer_ids to layers below 3"),
    ],
)
def test_wrong_layers_are_named(layer_ids: tuple[int, ...] | None, words: str) -> None:
    with pytest.raises(TargetError, match=words):
        resolve_layer_ids(4, 5, layer_ids)


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="no target folder"):
        load_target(TargetConfig(path=tmp_path / "nowhere"))
    with pytest.raises(TargetError, match=r"no config\.json"):
        load_target(TargetConfig(path=tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(TargetError, match="no model that can be loaded"):
        load_target(TargetConfig(path=tmp_path))


def test_a_model_without_weights_is_named(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(TargetError, match="cannot be loaded as a target model"):
        load_target(TargetConfig(path=tmp_path))


def test_a_half_copied_file_of_weights_is_refused(tmp_path: Path) -> None:
    file = tiny_target(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1_000])
    with pytest.raises(TargetError, match=r"cannot be loaded .*header.*target\.path"):
        load_target(TargetConfig(path=tmp_path))


def test_weights_of_another_shape_are_named(tmp_path: Path) -> None:
    file = tiny_target(tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 48}))
    with pytest.raises(TargetError, match=r"layers\.0\.mlp\.\w+\.weight in shape .*\(32, 48\)"):
        load_target(TargetConfig(path=tmp_path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "'yarn'.*factor"),
        ({"rope_scaling": "yarn"}, "field 'rope_parameters': TypeError: .*'yarn'"),
        ({"layer_types": ["full_attention"]}, "layer_type': ValueError: .*num_hidden_layers"),
    ],
)
def test_a_config_that_contradicts_itself_is_told_in_one_sentence(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    file = tiny_target(tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(TargetError, match=rf"cannot be loaded .*{words}.*target\.path"):
        load_target(TargetConfig(path=tmp_path))


def test_digest_follows_the_weights_and_the_code(folder: Path, tmp_path: Path) -> None:
    other = tiny_target(tmp_path / "other", seed=1)
    same = tiny_target(tmp_path / "same")
    assert target_digest(folder) == target_digest(same) != target_digest(other)
    (same / "modeling_own.py").write_text("# code that the folder brings")
    assert target_digest(folder) != target_digest(same)


def test_a_folder_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    path = tiny_target(tmp_path / "target")
    file = path / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in sorted(weights) if "q_proj" in name)
    rest = {key: value for key, value in weights.items() if key != name}
    save_file(rest, file, metadata={"format": "pt"})
    with pytest.raises(TargetError, match=rf"lacks 1 of .*{re.escape(name)}.*target\.path"):
        load_target(TargetConfig(path=path, layer_ids=TINY_LAYER_IDS))


def test_a_target_without_sdpa_needs_no_setting_and_refuses_a_wrong_one(tmp_path: Path) -> None:
    path = tiny_family(tmp_path, "gemma2", query_pre_attn_scalar=8, sliding_window=7)
    target = load_target(TargetConfig(path=path, layer_ids=TINY_LAYER_IDS))
    assert target.model.config._attn_implementation == "eager"
    check_packing(target)
    for attention in ("sdpa", "flash_attention_2"):
        with pytest.raises(TargetError, match=r"has no such attention.*set target\.attention"):
            load_target(TargetConfig(path=path, attention=attention))


def test_code_beside_the_weights_runs_only_where_it_is_trusted(tmp_path: Path) -> None:
    file = tiny_target(tmp_path) / "config.json"
    (tmp_path / "own.py").write_text(
        "from transformers import Qwen3Config, Qwen3ForCausalLM\n\n\n"
        "class OwnConfig(Qwen3Config):\n    model_type = 'own'\n\n\n"
        "class OwnModel(Qwen3ForCausalLM):\n    config_class = OwnConfig\n"
    )
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    raw = json.loads(file.read_text())
    file.write_text(json.dumps(raw | {"model_type": "own", "auto_map": auto_map}))
    config = TargetConfig(path=tmp_path, layer_ids=TINY_LAYER_IDS)
    with pytest.raises(TargetError, match=r"'own'.*target\.trust_remote_code"):
        load_target(config)
    target = load_target(config.model_copy(update={"trust_remote_code": True}))
    assert type(target.model).__name__ == "OwnModel"


QUANTISED = {
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "gptq": {"quant_method": "gptq", "bits": 4},
    "awq": {"quant_method": "awq", "bits": 4},
    "compressed-tensors": {"quant_method": "compressed-tensors", "config_groups": {}},
    "fp8": {"quant_method": "fp8"},
    "mxfp4": {"quant_method": "mxfp4"},
    "torchao": {"quant_method": "torchao", "quant_type": "int8_weight_only"},
}


@pytest.mark.parametrize("method", QUANTISED)
def test_weights_whose_quantisation_is_not_installed_name_the_library(
    folder: Path, tmp_path: Path, method: str
) -> None:
    if any(find_spec(name) for name in ("accelerate", "optimum", "gptqmodel", "torchao")):
        pytest.skip("libraries of quantisation are installed here")
    file = Path(copytree(folder, tmp_path, dirs_exist_ok=True)) / "config.json"
    quantised = {"quantization_config": QUANTISED[method]}
    file.write_text(json.dumps(json.loads(file.read_text()) | quantised))
    with pytest.raises(TargetError, match=rf"install what '{method}' needs, or set target\.path"):
        load_target(TargetConfig(path=tmp_path))


def test_a_quantisation_that_transformers_does_not_know_is_not_read_as_plain_weights(
    folder: Path, tmp_path: Path
) -> None:
    file = Path(copytree(folder, tmp_path, dirs_exist_ok=True)) / "config.json"
    quantised = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | quantised))
    with pytest.raises(TargetError, match="quantised by 'modelopt', which transformers 5"):
        load_target(TargetConfig(path=tmp_path))


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_a_quantised_target_loads_frozen(tmp_path: Path) -> None:
    config = TargetConfig(path=tiny_target(tmp_path / "plain"), layer_ids=TINY_LAYER_IDS)
    plain = load_target(config)
    four_bits = BitsAndBytesConfig(load_in_4bit=True)
    model = AutoModelForCausalLM.from_pretrained(config.path, quantization_config=four_bits)
    model.save_pretrained(tmp_path / "small")
    plain.tokenizer.save_pretrained(tmp_path / "small")
    target = load_target(config.model_copy(update={"path": tmp_path / "small"}))
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert torch.equal(target.lm_head.weight, plain.lm_head.weight)
    ids = torch.arange(5, 25)[None]
    near = torch.nn.functional.cosine_similarity(target.features(ids), plain.features(ids), dim=-1)
    assert near.min() > 0.9
