"""What the families of targets do around their decoder layers, found once from a model's config.

A family is one value in `FAMILIES`. One that is not there is taken to do nothing of its own; where
that is wrong, `dflash_core.target.check` refuses the model when it is loaded. No torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = [
    "FAMILIES",
    "LENGTH_DEPENDENT",
    "Family",
    "TargetTraits",
    "capped",
    "rope_of_layers",
    "target_traits",
]

# RoPE kinds of transformers whose frequencies follow the longest position of a call.
LENGTH_DEPENDENT = ("dynamic", "longrope")


@dataclass(frozen=True)
class Family:
    """How to read a family's scales from its config; 1 where it has none."""

    embedding: Callable[[Any], float] = lambda text: 1.0
    """What the first layer gets is the embedding row times this."""
    output: Callable[[Any], float] = lambda text: 1.0
    """Logits are the head's output times this, soft-capped where the config says so."""


def _root_of_width(text: Any) -> float:
    return text.hidden_size**0.5


GEMMA = Family(embedding=_root_of_width)
GRANITE = Family(
    embedding=lambda text: text.embedding_multiplier,
    output=lambda text: 1 / text.logits_scaling,
)
MINICPM = Family(
    embedding=lambda text: text.scale_emb,
    output=lambda text: text.dim_model_base / text.hidden_size,
)
COHERE = Family(output=lambda text: text.logit_scale)
FAMILIES = {
    "afmoe": Family(embedding=lambda text: _root_of_width(text) if text.mup_enabled else 1.0),
    "cohere": COHERE,
    "cohere2": COHERE,
    "cohere2_moe": COHERE,
    "falcon_h1": Family(
        embedding=lambda text: text.embedding_multiplier,
        output=lambda text: text.lm_head_multiplier,
    ),
    "gemma": GEMMA,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "gemma4_text": GEMMA,
    "gemma4_unified_text": GEMMA,
    "granite": GRANITE,
    "granite_swa": GRANITE,
    "granitemoe": GRANITE,
    "granitemoe_swa": GRANITE,
    "granitemoehybrid": GRANITE,
    "granitemoeshared": GRANITE,
    "hyperclovax": Family(
        embedding=lambda text: text.embedding_multiplier,
        output=lambda text: text.logits_scaling,
    ),
    "inkling_text": Family(output=lambda text: 1 / text.logits_mup_width_multiplier),
    "minicpm": MINICPM,  # the model's own code
    "minicpm3": MINICPM,
    "vaultgemma": GEMMA,
}


@dataclass(frozen=True)
class TargetTraits:
    """What a drafter and its decoding must know of a target.

    Attributes:
        embedding_scale: What the first layer gets is the embedding row times this. Drafters are
            trained on the rows themselves; an engine that embeds by the target's own module, as
            SGLang and transformers do, may hand them scaled ones.
        output_multiplier: Factor on the head's output.
        final_logit_softcapping: Bound of tanh-capped logits, or None.
        rope_parameters: RoPE for a drafter, in the schema of transformers 5.
        slides: Whether some layers see a window only.
        rms_norm_eps: Epsilon of its norms.
        initializer_range: Standard deviation of its first weights.
    """

    embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None
    rope_parameters: dict[str, Any]
    slides: bool
    rms_norm_eps: float
    initializer_range: float

    def logits(self, output: Any) -> Any:
        """Return the target's logits from its head's output, any shape."""
        return capped(output, self.output_multiplier, self.final_logit_softcapping)


def capped(output: Any, multiplier: float, cap: float | None) -> Any:
    """Return a head's output times a multiplier, and soft-capped where there is a cap."""
    if multiplier != 1.0:
        output = output * multiplier
    return output if cap is None else (output / cap).tanh() * cap


def target_traits(text: Any) -> TargetTraits:
    """Return the traits of a target.

    Args:
        text: The transformers config of its language model.
    """
    family = FAMILIES.get(text.model_type, Family())
    return TargetTraits(
        embedding_scale=float(family.embedding(text)),
        output_multiplier=float(family.output(text)),
        final_logit_softcapping=getattr(text, "final_logit_softcapping", None),
        rope_parameters=_drafter_rope(text),
        slides=getattr(text, "sliding_window", None) is not None,
        rms_norm_eps=float(getattr(text, "rms_norm_eps", 1e-6)),
        initializer_range=float(getattr(text, "initializer_range", None) or 0.02),
    )


def rope_of_layers(text: Any) -> list[dict[str, Any]]:
    """Return a target's RoPE parameters; several if its kinds of layers differ, full ones first."""
    rope = dict(getattr(text, "rope_parameters", None) or {})
    first = rope.get("full_attention")
    nested = [value for value in (first, *rope.values()) if isinstance(value, dict)]
    return nested or [rope]


def _drafter_rope(text: Any) -> dict[str, Any]:
    """Return the target's RoPE as every engine computes it for a drafter: whole heads, one kind.

    Kinds that depend on the longest position of a call become plain RoPE of the same base: engines
    choose their frequencies differently, and a new drafter has learnt none of them. Proportional
    RoPE of whole heads is linear RoPE.
    """
    rope = rope_of_layers(text)[0]
    kind = rope.get("rope_type", "default")
    base = {"rope_theta": float(rope.get("rope_theta") or 10_000.0)}
    if kind == "proportional":
        kind = "linear" if rope.get("factor", 1.0) != 1.0 else "default"
    if kind == "default" or kind in LENGTH_DEPENDENT:
        return {"rope_type": "default"} | base
    sections = ("mrope_section", "mrope_interleaved", "partial_rotary_factor")
    kept = {key: value for key, value in rope.items() if key not in sections}
    return kept | base | {"rope_type": kind}
