"""What released engines make of a written config, held against the drafter: one row an engine.

An engine that reads a field differently, or not at all, says nothing and accepts fewer drafts. Each
row was read in the files that it names; a new release is a new reading of them. A row states where
an engine departs from the authors' package, whose reading is the default.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from dflash_core.draft.build import TargetLike
from dflash_core.draft.spec import DraftSpec

__all__ = ["ENGINES", "Engine", "Served", "Verdict", "judge", "served", "trained"]

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Served:
    """The function that an engine runs, or that was trained.

    Attributes:
        causal: Whether each layer sees only earlier slots of its block.
        windows: Tokens back that each layer sees, the own position counted; None for all.
        rope: RoPE in the schema of transformers 5.
        embedding_scale: Factor on the target's raw embedding rows.
        dtype: Precision of the weights.
        mask_token_id: Embedding row of the slots to draft.
        layer_ids: Target decoder layers whose outputs are read, counted from 0.
        block_size: Slots of a block; None where whoever starts the engine has to say it.
    """

    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    rope: Mapping[str, Any]
    embedding_scale: float
    dtype: str
    mask_token_id: int | None
    layer_ids: tuple[int, ...]
    block_size: int | None


WORDS = {
    "causal": "causality inside the block, by layer",
    "windows": "window, by layer",
    "rope": "RoPE",
    "embedding_scale": "factor on embedding rows",
    "dtype": "weights",
    "mask_token_id": "mask token",
    "layer_ids": "target layers",
    "block_size": "block size",
}


def _inner(config: Config, name: str) -> Any:
    return (config.get("dflash_config") or {}).get(name)


def _slides(config: Config, layer: int) -> bool:
    return config["layer_types"][layer] == "sliding_attention"


def _inner_first(config: Config, name: str, default: Any = None) -> Any:
    found = (_inner(config, name), config.get(name))
    return next((value for value in found if value is not None), default)


def _causal_as_said(config: Config, layer: int) -> bool:
    said = config.get("is_causal")
    return _slides(config, layer) if said is None else bool(said)


def _causal_in_vllm(config: Config, layer: int) -> bool:
    default = False if config.get("model_type") == "muse_glimmer_assistant" else None
    said = (config.get("is_causal"), _inner(config, "causal"), default, _slides(config, layer))
    return bool(next(value for value in said if value is not None))


def _window_as_said(config: Config, layer: int) -> int | None:
    return config["sliding_window"] if _slides(config, layer) else None


def _window_in_vllm(config: Config, layer: int) -> int | None:
    any_slides = "sliding_attention" in config["layer_types"]
    slides = _slides(config, layer) if any_slides else bool(_inner(config, "use_swa"))
    width = _inner(config, "swa_window_size") or config.get("sliding_window")
    return width if slides else None


def _window_in_tensorrt(config: Config, layer: int) -> int | None:
    used = _slides(config, layer) and config.get("use_sliding_window") is not False
    return config.get("sliding_window") if used else None


def _rope_of_v5(config: Config) -> Config:
    return config.get("rope_parameters") or _rope_of_v4(config)


def _rope_of_v4(config: Config) -> Config:
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    return {**scaling, "rope_theta": config.get("rope_theta", 10_000.0)}


@dataclass(frozen=True)
class Engine:
    """How one engine reads a config.

    Attributes:
        name: Engine and version.
        source: Files that it was read in.
        layouts: Layouts that it loads.
        targets: Classes of targets that hand it hidden states; None where any does.
    """

    name: str
    source: str
    layouts: tuple[str, ...]
    targets: frozenset[str] | None = None
    causal: Callable[[Config, int], bool] = _causal_as_said
    window: Callable[[Config, int], int | None] = _window_as_said
    rope: Callable[[Config], Config] = _rope_of_v5
    embedding_scale: Callable[[Config, float], float] = lambda config, of_module: of_module
    dtype: Callable[[Config], str] = lambda config: config["dtype"]
    mask_token_id: Callable[[Config], Any] = lambda config: _inner_first(config, "mask_token_id")
    layer_ids: Callable[[Config], Any] = lambda config: _inner_first(config, "target_layer_ids")
    block_size: Callable[[Config], Any] = lambda config: _inner_first(config, "block_size")


# Architectures of set_dflash_layers_to_capture and of SupportsEagle3, subclasses included.
SGLANG_TARGETS = """
    DeepseekV2 DeepseekV3 DeepseekV32 Gemma4 Glm4MoeLite GlmMoeDsa GptOss IQuestCoder InternLM3
    KimiK3Linear Laguna Lfm2 Lfm2Moe Llama Llama4 Mellum MiMoV2 MiMoV2Flash Ministral3 Mistral
    MistralLarge3 MuseGlimmer Nanbeige NemotronH NemotronHPuzzle Phi3 Qwen3 Qwen3Moe Qwen3Next
    Qwen3_5 Qwen3_5Moe TeleFLM
    | Gemma4 Gemma4Unified Glm5Next Inkling KimiK25 KimiK3 Lfm2Vl MiniMaxM3Sparse MuseGlimmer
    MuseSpark Qwen3VL Qwen3VLMoe Qwen3_5 Qwen3_5Moe
"""
VLLM_TARGETS = """
    Afmoe Apertus Cohere2Moe Deepseek DeepseekV2 DeepseekV3 Ernie4_5 Gemma4 GptOss Granite
    GraniteMoe GraniteMoeSWA GraniteMoeShared GraniteSWA IQuestCoder InternLM3 Laguna Llama Llama4
    MiMo MiMoV2 MiMoV2Flash MiniCPM MiniCPM3 MiniMaxM2 Ministral3 Mistral MistralLarge3 MuseGlimmer
    NemotronH NemotronHPuzzle Phi3 Plamo3 Qwen2 Qwen3 Qwen3Moe Qwen3Next Qwen3_5 Qwen3_5Moe
    SarvamMLA TeleChat2 TeleChat3 TeleFLM
    | Exaone4_5_ Gemma4 Gemma4Unified KimiK25 Llama4 Llava Mistral3 MuseGlimmer Pixtral Qwen2_5_VL
    Qwen3OmniMoe Qwen3VL Qwen3VLMoe Qwen3_5 Qwen3_5Moe
"""


def _classes(stems: str) -> frozenset[str]:
    texts, others = stems.split("|")
    return frozenset(f"{stem}ForCausalLM" for stem in texts.split()) | frozenset(
        f"{stem}ForConditionalGeneration" for stem in others.split()
    )


ENGINES = (
    Engine(
        "vLLM 0.33.0",
        "model_executor/models/qwen3_dflash.py, config/speculative.py, "
        "transformers_utils/configs/speculators/algos.py",
        layouts=("zlab", "speculators", "transformers"),
        targets=_classes(VLLM_TARGETS),
        causal=_causal_in_vllm,
        window=_window_in_vllm,
        embedding_scale=lambda config, of_module: 1.0,
        block_size=lambda config: config.get("proposed_block_size"),
    ),
    Engine(
        "SGLang 0.5.23",
        "srt/models/dflash.py, srt/speculative/dflash_utils.py, srt/configs/model_config.py",
        layouts=("zlab", "transformers"),
        targets=_classes(SGLANG_TARGETS),
        dtype=lambda config: "float16" if config["dtype"] == "float32" else config["dtype"],
    ),
    Engine(
        "TensorRT-LLM main of 2026-09",
        "_torch/models/modeling_dflash.py, _torch/pyexecutor/config_utils.py",
        layouts=("zlab",),
        causal=lambda config, layer: _window_in_tensorrt(config, layer) is not None,
        window=lambda config, layer: (
            _inner(config, "swa_window_size")
            if _slides(config, layer) and _inner(config, "use_swa")
            else _window_in_tensorrt(config, layer)
        ),
        rope=_rope_of_v4,
        mask_token_id=lambda config: _inner_first(config, "mask_token_id", config["vocab_size"]),
        layer_ids=lambda config: _inner(config, "target_layer_ids"),
    ),
    Engine(
        "dflash 0.1.0",
        "dflash/model.py",
        layouts=("zlab",),
        embedding_scale=lambda config, of_module: _scale_said(config),
    ),
    Engine(
        "dflash 0.1.0 on MLX",
        "dflash/model_mlx.py",
        layouts=("zlab",),
        embedding_scale=lambda config, of_module: of_module * _scale_said(config),
        rope=lambda config: {**_rope_of_v5(config), "rope_theta": config["rope_theta"]},
        mask_token_id=lambda config: _inner(config, "mask_token_id"),
        layer_ids=lambda config: _inner(config, "target_layer_ids"),
    ),
    Engine(
        "transformers 5.24.0",
        "generation/candidate_generator.py, models/muse_glimmer_assistant, masking_utils.py",
        layouts=("transformers",),
        causal=lambda config, layer: False,
        window=lambda config, layer: (
            config["sliding_window"] + 1 if _slides(config, layer) else None
        ),
        mask_token_id=lambda config: config.get("mask_token_id"),
        layer_ids=lambda config: config.get("target_layer_ids"),
        block_size=lambda config: config.get("block_size"),
    ),
)


def _scale_said(config: Config) -> float:
    return float(_inner_first(config, "input_embedding_scale", 1.0))


def _flat(config: Config) -> Config:
    """Return a speculators config as vLLM flattens it (algos.py, `update_dflash`)."""
    if "speculators_model_type" not in config:
        return config
    method = config["speculators_config"]["proposal_methods"][0]
    return config["transformer_layer_config"] | {
        "dflash_config": {
            "mask_token_id": config["mask_token_id"],
            "target_layer_ids": [layer - 1 for layer in config["aux_hidden_state_layer_ids"]],
            "causal": not config.get("sliding_window_non_causal", True),
        },
        "proposed_block_size": method["speculative_tokens"] + 1,
    }


def served(engine: Engine, config: Config, *, module_scale: float = 1.0) -> Served:
    """Return what an engine runs.

    Args:
        engine: A row of the table.
        config: The content of an export's ``config.json``.
        module_scale: Factor that the target's embedding module applies to its rows.
    """
    config = _flat(config)
    layers = range(config["num_hidden_layers"])
    return Served(
        causal=tuple(engine.causal(config, layer) for layer in layers),
        windows=tuple(engine.window(config, layer) for layer in layers),
        rope=engine.rope(config),
        embedding_scale=engine.embedding_scale(config, module_scale),
        dtype=engine.dtype(config),
        mask_token_id=engine.mask_token_id(config),
        layer_ids=tuple(engine.layer_ids(config) or ()),
        block_size=engine.block_size(config),
    )


def trained(spec: DraftSpec, dtype: str) -> Served:
    """Return what the drafter is, with weights stored in ``dtype``."""
    layers = range(spec.num_layers)
    return Served(
        causal=tuple(map(spec.causal, layers)),
        windows=tuple(map(spec.window, layers)),
        rope=spec.rope_parameters,
        embedding_scale=spec.input_embedding_scale,
        dtype=dtype,
        mask_token_id=spec.mask_token_id,
        layer_ids=spec.target_layer_ids,
        block_size=spec.block_size,
    )


@dataclass(frozen=True)
class Verdict:
    """What comes of a drafter in one engine.

    Attributes:
        engine: Engine and version.
        refuses: Why it does not serve the drafter at all; None where it does.
        wrong: What it would serve otherwise than trained, in words.
    """

    engine: str
    refuses: str | None = None
    wrong: tuple[str, ...] = ()


def judge(
    spec: DraftSpec, config: Config, layout: str, target: TargetLike | None = None
) -> list[Verdict]:
    """Return what each engine makes of an export.

    Args:
        spec: The drafter.
        config: The content of the export's ``config.json``.
        layout: Its layout.
        target: The target; without it engines are not asked for its class, and embedding modules
            are taken to return raw rows.
    """
    scale, classes = 1.0, set[str]()
    if target is not None:
        scale = float(getattr(target.input_embeddings, "embed_scale", 1.0))
        classes = {type(target.model).__name__, *(target.model.config.architectures or ())}
    wanted = trained(spec, config["dtype"])
    return [_verdict(engine, config, layout, wanted, classes, scale) for engine in ENGINES]


def _verdict(
    engine: Engine, config: Config, layout: str, wanted: Served, classes: set[str], scale: float
) -> Verdict:
    if layout not in engine.layouts:
        return Verdict(engine.name, f"reads {' and '.join(engine.layouts)}, not {layout}")
    if classes and engine.targets is not None and not classes & engine.targets:
        return Verdict(engine.name, f"has no hidden states of {min(classes)} targets for drafters")
    found = served(engine, config, module_scale=scale)
    wrong = tuple(
        f"{WORDS[field.name]} {_shown(is_value)} instead of {_shown(should_be)}"
        for field in fields(Served)
        for is_value, should_be in [(getattr(found, field.name), getattr(wanted, field.name))]
        if is_value is not None and not _equal(is_value, should_be)
    )
    return Verdict(engine.name, wrong=wrong)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)
    return one == other


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join('all' if part is None else str(part).lower() for part in value)})"
    return f"{value:g}" if isinstance(value, float) else str(value)
