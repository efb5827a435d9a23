"""The z-lab layout: what SGLang, vLLM and the authors' package load.

A folder with ``config.json`` and safetensors whose names have no prefix; embedding and head are
the target's and absent. Block size, mask token and layer ids stand at the top and inside
``dflash_config`` because readers differ (`dflash_core.export.engines`), RoPE stands in the schemas
of transformers 4 and 5, and there is no ``auto_map``.
Every tensor is checked against the drafter's shape when read: a wrongly named weight would
otherwise be a random layer in a server that skips unknown names.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config

from dflash_core.draft.model import DraftModel
from dflash_core.draft.spec import DraftSpec
from dflash_core.errors import DraftError
from dflash_core.target.layers import published_layer_ids

__all__ = ["CONFIG_NAME", "WEIGHTS_NAME", "load_drafter", "read_spec", "zlab_config"]

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"

# Fields of any config, or of its RoPE, with the one value that `DraftModel` computes.
PLAIN = dict(
    **dict.fromkeys(("rope_is_neox_style", "is_neox_style"), True),
    **dict.fromkeys(("mlp_bias", "use_gemma_norm", "sample_from_anchor"), False),
    **dict.fromkeys(("fc_norm", "norm_output")),
    hidden_act="silu",
    partial_rotary_factor=1.0,
)
HEADS = re.compile("markov|lilicorr|selector|^conv_|projector|confidence|sink|v(alue)?_scale$")
HONOURED = {
    *("block_size", "mask_token_id", "mask_token", "target_layer_ids", "num_target_layers"),
    *("use_swa", "swa_window_size", "causal", "is_causal"),
    *("input_embedding_scale", "output_multiplier", "final_logit_softcapping"),
}
SEPARATE_MASK = "mask_embedding.pt"  # a row that servers put in the mask token's place


def zlab_config(spec: DraftSpec, dtype: torch.dtype) -> dict[str, Any]:
    """Return the content of ``config.json``."""
    rope = dict(spec.rope_parameters)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    twice: dict[str, Any] = {
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
        "target_layer_ids": list(spec.target_layer_ids),
    }
    dflash = dict(twice)
    if spec.input_embedding_scale != 1.0:
        dflash["input_embedding_scale"] = spec.input_embedding_scale
    if spec.output_multiplier != 1.0:
        dflash["output_multiplier"] = spec.output_multiplier
    if spec.final_logit_softcapping is not None:
        dflash["final_logit_softcapping"] = spec.final_logit_softcapping
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": spec.attention_bias,
        "attention_dropout": 0.0,
        "dflash_config": dflash,
        "dtype": str(dtype).removeprefix("torch."),
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "layer_types": list(spec.layer_types),
        "max_position_embeddings": spec.max_position_embeddings,
        "model_type": "qwen3",
        "num_attention_heads": spec.num_attention_heads,
        "num_hidden_layers": spec.num_layers,
        "num_key_value_heads": spec.num_key_value_heads,
        "num_target_layers": spec.num_target_layers,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_parameters": rope,
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "rope_theta": rope["rope_theta"],
        "sliding_window": spec.sliding_window,
        "tie_word_embeddings": False,
        "use_sliding_window": "sliding_attention" in spec.layer_types,
        "vocab_size": spec.vocab_size,
    }
    if spec.is_causal is not None:
        config["is_causal"] = spec.is_causal
        dflash["causal"] = spec.is_causal
    if set(spec.layer_types) == {"sliding_attention"}:
        dflash |= {"use_swa": True, "swa_window_size": spec.sliding_window}
    return config | twice


def read_spec(path: Path) -> DraftSpec:
    """Read a drafter's shape from its ``config.json``.

    Raises:
        DraftError: No such file, not a DFlash drafter, or a feature that is not supported.
    """
    file = path / CONFIG_NAME
    if not file.is_file():
        raise DraftError(f"{path} is no drafter: it has no {CONFIG_NAME}")
    try:
        raw = json.loads(file.read_bytes())
    except ValueError as error:
        raise DraftError(f"{file} is not JSON: {error}") from None
    dflash = raw.get("dflash_config") if isinstance(raw, dict) else None
    if not isinstance(dflash, dict) or "mask_token_id" not in dflash:
        raise DraftError(f"{file} has no dflash_config with a mask_token_id: not a DFlash drafter")
    architectures = raw.get("architectures") or ["DFlashDraftModel"]
    if architectures != ["DFlashDraftModel"]:
        raise DraftError(f"{file} describes {architectures}, which is no plain DFlash drafter")
    foreign = _foreign_traits(raw, dflash)
    if (path / SEPARATE_MASK).exists():
        foreign.append(SEPARATE_MASK)
    if foreign:
        raise DraftError(
            f"{file} asks for {', '.join(foreign)}, which a plain DFlash drafter does not have and "
            "which is not computed here; name a drafter without"
        )
    try:
        return _spec(raw, dflash)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        words = f"{where} {problem['msg'].removeprefix('Value error, ')}".strip()
        raise DraftError(f"{file} is not usable: {words}") from None
    except KeyError as error:
        raise DraftError(f"{file} is not usable: {error} is missing") from None
    except (TypeError, ValueError, AttributeError, StrictDataclassError) as error:
        first = " ".join(str(error).split())
        raise DraftError(f"{file} is not usable: {first}") from None


def load_drafter(path: Path, *, dtype: torch.dtype | None = None) -> DraftModel:
    """Load a drafter in z-lab layout, ours or anyone's, in evaluation mode on the CPU.

    Args:
        path: The folder.
        dtype: Precision to run in; the checkpoint's when not given.

    Raises:
        DraftError: A tensor is missing, unknown, of a wrong shape or not finite.
    """
    path = Path(path)
    spec = read_spec(path)
    tensors = read_tensors(path)
    with torch.device("meta"):
        model = DraftModel(spec)
    check_tensors(path, tensors, {k: v.shape for k, v in model.state_dict().items()})
    dtype = dtype or next(iter(tensors.values())).dtype
    model = DraftModel(spec)
    model.load_state_dict(tensors, strict=True)
    return model.to(dtype).eval()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read every safetensors file of a folder."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise DraftError(f"{path} holds no safetensors file")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except SafetensorError as error:
            raise DraftError(f"{file} is damaged: {error}") from None
    return tensors


def check_tensors(path: Path, tensors: dict[str, Tensor], shapes: dict[str, torch.Size]) -> None:
    """Refuse missing, extra, misshapen or non-finite tensors, naming the first.

    Raises:
        DraftError: Any of these.
    """
    missing, extra = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    if missing or extra:
        kind, names = ("lacks", missing) if missing else ("has the unknown", extra)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise DraftError(f"{path} {kind} tensor {names[0]}{more}; its config.json does not fit it")
    for name, shape in sorted(shapes.items()):
        if tensors[name].shape != shape:
            raise DraftError(
                f"{path}: tensor {name} has shape {tuple(tensors[name].shape)} but config.json "
                f"says {tuple(shape)}"
            )
        if not tensors[name].is_floating_point():
            raise DraftError(f"{path}: tensor {name} holds {tensors[name].dtype}, not weights")
        if not torch.isfinite(tensors[name]).all():
            raise DraftError(f"{path}: tensor {name} holds NaN or infinity")


def _foreign_traits(raw: dict[str, Any], dflash: dict[str, Any]) -> list[str]:
    """Return what a config asks for beyond the function that `DraftModel` computes.

    At the top stand fields of any transformers config, so those that matter are listed; inside
    ``dflash_config`` everything matters that is not known to be honoured.
    """
    ropes = [raw.get(schema) or {} for schema in ("rope_parameters", "rope_scaling")]
    asked = {key: (raw[key], plain) for key, plain in PLAIN.items() if key in raw}
    asked |= {key: (raw[key], None) for key in raw if HEADS.search(key)}
    asked |= {f"dflash_config.{key}": (dflash[key], None) for key in dflash.keys() - HONOURED}
    for rope in ropes:
        asked |= {key: (value, None) for key, value in rope.items() if isinstance(value, dict)}
        asked |= {key: (rope[key], plain) for key, plain in PLAIN.items() if key in rope}
        if "rope_dim" in rope:
            asked["rope_dim"] = (rope["rope_dim"], raw.get("head_dim"))
    if any(rope.get("rope_dim") for rope in ropes):  # servers take it before the partial factor
        asked.pop("partial_rotary_factor", None)
    return sorted(
        f"{key} = {json.dumps(value)}"
        for key, (value, plain) in asked.items()
        if value is not None and value != plain and (value or plain)
    )


def _spec(raw: dict[str, Any], dflash: dict[str, Any]) -> DraftSpec:
    qwen3: Any = Qwen3Config.from_dict(raw)
    num_target_layers = int(raw["num_target_layers"])

    def value(name: str, default: Any = None) -> Any:  # null counts as absent
        found = (part[name] for part in (dflash, raw) if part.get(name) is not None)
        return next(found, default)

    slides = value("use_swa") or "sliding_attention" in qwen3.layer_types
    if slides and raw.get("sliding_window") and not raw.get("use_sliding_window"):
        raise ValueError(
            f"sliding_window {raw['sliding_window']} counts for nothing without use_sliding_window,"
            " though a layer is to slide; set use_sliding_window to true"
        )
    if value("use_swa") and (
        "sliding_attention" not in qwen3.layer_types
        or value("swa_window_size") not in (None, qwen3.sliding_window)
    ):
        raise ValueError(
            f"use_swa with swa_window_size {value('swa_window_size')} contradicts layer_types "
            f"{list(qwen3.layer_types)} with sliding_window {qwen3.sliding_window}; name the "
            "sliding layers in layer_types and their width in sliding_window"
        )
    layer_ids = value("target_layer_ids")
    if not layer_ids:
        layer_ids = published_layer_ids(num_target_layers, qwen3.num_hidden_layers)
    return DraftSpec(
        hidden_size=qwen3.hidden_size,
        num_layers=qwen3.num_hidden_layers,
        block_size=value("block_size", 16),
        intermediate_size=qwen3.intermediate_size,
        num_attention_heads=qwen3.num_attention_heads,
        num_key_value_heads=qwen3.num_key_value_heads,
        head_dim=qwen3.head_dim,
        vocab_size=qwen3.vocab_size,
        mask_token_id=dflash["mask_token_id"],
        target_layer_ids=tuple(layer_ids),
        num_target_layers=num_target_layers,
        rms_norm_eps=qwen3.rms_norm_eps,
        rope_parameters={
            key: value
            for key, value in qwen3.rope_parameters.items()
            if key not in ("rope_dim", "partial_rotary_factor")  # checked to be the whole head
        },
        max_position_embeddings=qwen3.max_position_embeddings,
        layer_types=tuple(qwen3.layer_types),
        sliding_window=qwen3.sliding_window,
        is_causal=value("is_causal", value("causal")),
        attention_bias=qwen3.attention_bias,
        input_embedding_scale=value("input_embedding_scale", 1.0),
        output_multiplier=value("output_multiplier", 1.0),
        final_logit_softcapping=value("final_logit_softcapping") or None,
    )
