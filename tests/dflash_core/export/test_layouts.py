"""What is written, what is refused when read, and the other layout."""

import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_core.corpus.store import TokenStore, write_store
from dflash_core.errors import ArtifactError, DraftError
from dflash_core.export.write import export_drafter
from dflash_core.export.zlab import load_drafter
from tests.dflash_core.draft.parts import document, small_drafter, small_target


@pytest.fixture(scope="module")
def target():
    return small_target()


@pytest.fixture
def folder(target, tmp_path):
    return export_drafter(small_drafter(target), tmp_path / "drafter", manifest={"commit": "abc"})


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def poison(tensors):
    tensors["norm.weight"][0] = float("nan")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tensors: tensors.pop("fc.weight"), "lacks tensor fc.weight"),
        (
            lambda tensors: tensors.update({"model.fc.weight": tensors.pop("fc.weight")}),
            "lacks tensor fc.weight",
        ),
        (lambda tensors: tensors.update(extra=torch.ones(1)), "has the unknown tensor extra"),
        (
            lambda tensors: tensors.update({"norm.weight": torch.ones(7)}),
            r"norm.weight has shape \(7,\) but config.json says \(32,\)",
        ),
        (poison, "norm.weight holds NaN"),
    ],
)
def test_wrong_weights_are_refused(folder, change, sentence):
    edit_tensors(folder, change)
    with pytest.raises(DraftError, match=sentence):
        load_drafter(folder)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dflash_config": {}}, "no dflash_config with a mask_token_id"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
        ({"num_target_layers": 2}, "names layer 2, but the target has layers 0..1"),
        ({"dflash_config": {"mask_token_id": 96, "block_size": 1}}, "block_size"),
        (
            {"dflash_config": {"mask_token_id": 96, "use_swa": True, "swa_window_size": 64}},
            "use_swa with swa_window_size 64 contradicts layer_types",
        ),
        (
            {
                "sliding_window": 64,
                "use_sliding_window": False,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "sliding_window 64 counts for nothing .*set use_sliding_window to true",
        ),
    ],
)
def test_a_wrong_config_is_refused(folder, changes, sentence):
    edit_config(folder, **changes)
    with pytest.raises(DraftError, match=sentence):
        load_drafter(folder)


def test_older_checkpoints_are_read(folder):
    """Block size at the top only, RoPE in the schema of transformers 4."""
    raw = json.loads((folder / "config.json").read_text())
    raw["dflash_config"].pop("block_size")
    raw.pop("rope_parameters")
    raw["rope_theta"] = 5_000.0
    (folder / "config.json").write_text(json.dumps(raw))
    spec = load_drafter(folder).spec
    assert (spec.block_size, spec.rope_parameters["rope_theta"]) == (4, 5_000.0)


def test_what_stands_at_the_top_or_is_null_is_read(folder):
    """Inside dflash_config first, then at the top; null says nothing."""
    top = {"input_embedding_scale": 16.0, "output_multiplier": 0.25, "is_causal": None}
    inside = {"causal": True, "output_multiplier": 0.5, "final_logit_softcapping": None}
    raw = json.loads((folder / "config.json").read_text())
    edit_config(folder, **top, dflash_config=raw["dflash_config"] | inside)
    spec = load_drafter(folder).spec
    assert (spec.input_embedding_scale, spec.output_multiplier) == (16.0, 0.5)
    assert (spec.is_causal, spec.final_logit_softcapping) == (True, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_positions_stay_exact_whatever_the_weights_are_cast_to(target, tmp_path, dtype):
    """An angle of 2,000 rounded to float32 is off by 1.2e-4; bfloat16 frequencies by several."""
    out = export_drafter(small_drafter(target), tmp_path / "drafter", dtype=torch.bfloat16)
    drafter = load_drafter(out).to(dtype)
    size, theta = drafter.spec.head_dim, drafter.spec.rope_parameters["rope_theta"]
    angles = 2_000 * theta ** -(np.arange(0, size, 2) / size)
    cos, sin = drafter.rotary_emb(torch.zeros(1), torch.tensor([[2_000]]))
    np.testing.assert_allclose(cos[0, 0, : size // 2], np.cos(angles), atol=2e-4)
    np.testing.assert_allclose(sin[0, 0, : size // 2], np.sin(angles), atol=2e-4)


def test_the_config_says_what_servers_ask_for(folder):
    raw = json.loads((folder / "config.json").read_text())
    assert raw["block_size"] == raw["dflash_config"]["block_size"] == 4
    assert raw["target_layer_ids"] == raw["dflash_config"]["target_layer_ids"] == [0, 2]
    assert raw["mask_token_id"] == raw["dflash_config"]["mask_token_id"] == 96
    assert raw["is_causal"] is raw["dflash_config"]["causal"] is False
    assert "use_swa" not in raw["dflash_config"]
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"]
    assert raw["rope_scaling"] is None
    assert "auto_map" not in raw
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["metadata"]["commit"] == "abc"


def test_weights_that_are_not_finite_are_not_written(target, tmp_path):
    drafter = small_drafter(target)
    with torch.no_grad():
        drafter.fc.weight[0, 0] = float("inf")
    with pytest.raises(DraftError, match=r"fc\.weight holds NaN or infinity"):
        export_drafter(drafter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_only_a_drafter_and_nothing_else_is_replaced(target, folder, tmp_path):
    export_drafter(small_drafter(target), folder)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ArtifactError, match=r"also holds notes\.txt"):
        export_drafter(small_drafter(target), folder)
    store = write_store(tmp_path / "store", [document(9)])
    with pytest.raises(ArtifactError, match="is no drafter, so it is not replaced"):
        export_drafter(small_drafter(target), tmp_path / "store")
    assert TokenStore.open(tmp_path / "store", verify=True).content_hash == store.content_hash
    assert (folder / "notes.txt").read_text() == "mine"


def test_speculators_carries_embedding_head_and_the_reduced_vocabulary(target, tmp_path):
    ids = np.arange(1, 97, 3)
    drafter = small_drafter(target, draft_vocab_size=len(ids), draft_token_ids=ids)
    out = export_drafter(drafter, tmp_path / "out", layout="speculators", target=target)
    raw = json.loads((out / "config.json").read_text())
    assert raw["aux_hidden_state_layer_ids"] == [1, 3]
    assert raw["draft_vocab_size"] == len(ids)
    tensors = load_file(out / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], target.lm_head.weight[ids].bfloat16())
    assert torch.equal(tensors["embed_tokens.weight"], target.input_embeddings.weight.bfloat16())
    assert (torch.arange(len(ids)) + tensors["d2t"]).tolist() == ids.tolist()
    assert tensors["t2d"].nonzero()[:, 0].tolist() == ids.tolist()


def test_a_reduced_vocabulary_is_the_whole_one_in_zlab(target, tmp_path):
    ids = np.arange(1, 97, 3)
    drafter = small_drafter(target, draft_vocab_size=len(ids), draft_token_ids=ids)
    out = export_drafter(drafter, tmp_path / "out")
    assert load_drafter(out).draft_token_ids is None
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["metadata"]["draft_token_ids"] == ids.tolist()


SLIDING = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 9}
MIXED = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9}


@pytest.mark.parametrize(
    ("layout", "traits", "words"),
    [
        ("speculators", {"is_causal": True}, "causal full-attention layers"),
        ("speculators", MIXED, "layers of differing causality"),
        ("transformers", SLIDING, "layers that are causal in their block"),
        ("transformers", SLIDING | {"sliding_window": 2, "is_causal": False}, "sliding_window 2"),
    ],
)
def test_what_a_layout_cannot_say_is_refused(target, tmp_path, layout, traits, words):
    drafter = small_drafter(target, **traits)
    with pytest.raises(DraftError, match=f"no field for {words}; export in the zlab layout"):
        export_drafter(drafter, tmp_path / "out", layout=layout, target=target)


def test_causality_is_always_said_and_so_is_a_window_of_every_layer(target, tmp_path):
    drafter = small_drafter(target, **SLIDING)
    out = export_drafter(drafter, tmp_path / "out")
    raw = json.loads((out / "config.json").read_text())
    assert raw["is_causal"] is raw["dflash_config"]["causal"] is True
    assert (raw["dflash_config"]["use_swa"], raw["dflash_config"]["swa_window_size"]) == (True, 9)
    assert load_drafter(out).spec == drafter.spec


def test_weights_are_bfloat16_unless_asked(target, tmp_path):
    """A float32 config makes SGLang load float16 beside a bfloat16 target."""
    drafter = small_drafter(target)
    for dtype, asked in (("bfloat16", {}), ("float32", {"dtype": torch.float32})):
        out = export_drafter(drafter, tmp_path / dtype, **asked)
        assert json.loads((out / "config.json").read_text())["dtype"] == dtype
        stored = load_file(out / "model.safetensors").values()
        assert {tensor.dtype for tensor in stored} == {getattr(torch, dtype)}


@pytest.mark.parametrize(
    ("top", "inside", "words"),
    [
        ({"partial_rotary_factor": 0.5}, {}, "partial_rotary_factor = 0.5"),
        ({"rope_is_neox_style": False}, {}, "rope_is_neox_style = false"),
        ({"rope_scaling": {"rope_dim": 4}}, {}, "rope_dim = 4"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, {}, "full_attention = {"),
        ({"hidden_act": "gelu"}, {}, 'hidden_act = "gelu"'),
        ({"markov_rank": 64}, {}, "markov_rank = 64"),
        ({}, {"projector_type": "domino"}, 'dflash_config.projector_type = "domino"'),
        ({}, {"attention_sink_bias": True}, "dflash_config.attention_sink_bias = true"),
        ({}, {"selector_rank": 256}, "dflash_config.selector_rank = 256"),
        ({}, {"of_next_year": "on"}, 'dflash_config.of_next_year = "on"'),
    ],
)
def test_a_foreign_drafter_is_not_measured_as_a_plain_one(folder, top, inside, words):
    raw = json.loads((folder / "config.json").read_text())
    edit_config(folder, **top, dflash_config=raw["dflash_config"] | inside)
    with pytest.raises(DraftError, match=re.escape(f"asks for {words}")):
        load_drafter(folder)


def test_foreign_fields_that_change_nothing_are_read(folder):
    """Switched off, or of the target and superseded: the rotary width is the whole head."""
    raw = json.loads((folder / "config.json").read_text())
    rope = raw["rope_parameters"] | {"rope_dim": 8, "partial_rotary_factor": 0.25}
    off = {"conv_kernel_size": 0, "projector_type": None, "sample_from_anchor": False}
    edit_config(folder, rope_parameters=rope, dflash_config=raw["dflash_config"] | off)
    spec = load_drafter(folder).spec
    assert spec.rope_parameters == raw["rope_parameters"]
    (folder / "mask_embedding.pt").touch()
    with pytest.raises(DraftError, match=r"asks for mask_embedding\.pt"):
        load_drafter(folder)
