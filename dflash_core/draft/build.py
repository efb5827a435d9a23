"""A new drafter for a target: shapes, RoPE and scales from the target, weights from a seed."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_core.draft.config import DraftConfig
from dflash_core.draft.from_target import copy_target_layers, norm_scale
from dflash_core.draft.model import DraftModel
from dflash_core.draft.spec import DraftSpec, LayerType
from dflash_core.errors import DraftError
from dflash_core.target.families import target_traits

__all__ = ["TargetLike", "build_drafter", "draft_spec", "find_mask_token", "frequent_tokens"]

MASK_NAMES = ("<|MASK|>", "<|mask|>", "<mask>", "[MASK]")
RESERVED_PREFIXES = ("<|reserved", "<unused", "<|unused", "<|extra", "[unused")
INITIAL_EXCESS = 1.0  # nats over ln(vocabulary) that a random output may lose


class TargetLike(Protocol):
    """What a drafter needs to know of its target."""

    model: Any
    tokenizer: Any

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Decoder layers whose outputs feed the drafter."""
        ...

    @property
    def input_embeddings(self) -> Any:
        """The embedding module."""
        ...

    @property
    def lm_head(self) -> Any:
        """The head module."""
        ...


def build_drafter(
    config: DraftConfig,
    target: TargetLike,
    *,
    seed: int = 0,
    draft_token_ids: NDArray[np.int64] | None = None,
) -> DraftModel:
    """Return a new drafter with weights drawn from the seed, in float32 on the target's device.

    Weights are normal with the target's initializer range and norms are 1 (or, with
    ``initial_weights="target"``, copies of the target's layers), with two exceptions
    that bring the first loss near ln(vocabulary): the final norm is the target's own, scaled down
    where the target's head would read it too loudly, and the first MLP cancels the mask token.

    Args:
        config: The drafter's shape.
        target: The frozen target.
        seed: Seed of the weights.
        draft_token_ids: Increasing ids that the drafter can propose, with
            ``config.draft_vocab_size``; see `frequent_tokens`.

    Raises:
        DraftError: The shapes do not fit, no mask token is found, or the target has no layers to
            copy.
    """
    spec = draft_spec(config, target)
    ids = _check_token_ids(spec, draft_token_ids)
    model = DraftModel(spec, ids)
    generator = torch.Generator().manual_seed(seed)
    std = target_traits(_text_config(target)).initializer_range
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std, generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    if config.initial_weights == "target":
        copy_target_layers(model, target)
    _silence_mask(model, target.input_embeddings.weight[spec.mask_token_id].detach().float().cpu())
    with torch.no_grad():
        model.norm.weight.copy_(_output_norm(model, target))
    return model.to(target.lm_head.weight.device)


def draft_spec(config: DraftConfig, target: TargetLike) -> DraftSpec:
    """Resolve a drafter's shape against its target.

    Raises:
        DraftError: The shapes do not fit, or no mask token is found.
    """
    text = _text_config(target)
    traits = target_traits(text)
    heads = config.num_attention_heads or text.num_attention_heads
    layer_types: tuple[LayerType, ...] = config.layer_types or (
        ("full_attention",) * config.num_layers
    )
    embedding_VD = target.input_embeddings.weight
    try:
        return DraftSpec(
            hidden_size=text.hidden_size,
            num_layers=config.num_layers,
            block_size=config.block_size,
            intermediate_size=config.intermediate_size or _of_all_layers(text, "intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=config.num_key_value_heads or _key_value_heads(text, heads),
            head_dim=config.head_dim or _head_dim(text),
            vocab_size=embedding_VD.shape[0],
            mask_token_id=find_mask_token(config, target),
            target_layer_ids=tuple(target.layer_ids),
            num_target_layers=text.num_hidden_layers,
            rms_norm_eps=traits.rms_norm_eps,
            rope_parameters=traits.rope_parameters,
            max_position_embeddings=text.max_position_embeddings,
            layer_types=layer_types,
            sliding_window=config.sliding_window,
            is_causal=config.is_causal,
            final_logit_softcapping=traits.final_logit_softcapping,
            output_multiplier=traits.output_multiplier,
            draft_vocab_size=config.draft_vocab_size,
        )
    except ValidationError as error:
        message = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise DraftError(f"this drafter does not fit its target: {message}") from None


def find_mask_token(config: DraftConfig, target: TargetLike) -> int:
    """Return the mask token: as set, else a token made for it, else a row that no text can hold.

    Raises:
        DraftError: The id is outside the embedding or is pad, bos, eos or unk, or none was found.
    """
    tokenizer = target.tokenizer
    rows = target.input_embeddings.weight.shape[0]
    used = _control_ids(target)
    if config.mask_token_id is not None:
        name = used.get(config.mask_token_id)
        if name is not None:
            raise DraftError(
                f"mask token {config.mask_token_id} is the target's {name} token; set "
                "draft.mask_token_id to an id that occurs nowhere in the data"
            )
        if config.mask_token_id >= rows:
            raise DraftError(
                f"mask token {config.mask_token_id} is outside the target's {rows:,} embedding "
                "rows; lower draft.mask_token_id"
            )
        return config.mask_token_id
    vocabulary: Mapping[str, int] = tokenizer.get_vocab() if tokenizer is not None else {}
    for name in MASK_NAMES:
        if name in vocabulary and vocabulary[name] not in used and vocabulary[name] < rows:
            return vocabulary[name]
    beyond = max(vocabulary.values(), default=rows) + 1
    if beyond < rows:
        return beyond
    reserved = sorted(i for t, i in vocabulary.items() if t.startswith(RESERVED_PREFIXES))
    for token_id in reserved:
        if token_id not in used and token_id < rows:
            return token_id
    raise DraftError(
        f"the target's {rows:,} embedding rows hold no reserved token for the slots to draft; set "
        "draft.mask_token_id to an id that occurs nowhere in the data"
    )


def frequent_tokens(
    counts_V: NDArray[np.int64], size: int, *, always: tuple[int, ...] = ()
) -> NDArray[np.int64]:
    """Return the ids of a reduced draft vocabulary: the most frequent tokens, increasing.

    Args:
        counts_V: Occurrences of each token among supervised ones, shape ``(vocabulary,)``.
        size: Tokens to keep.
        always: Ids that are kept whatever their count, such as the end of a turn.

    Raises:
        DraftError: ``size`` is over the vocabulary or under the number of forced ids.

    Example:
        >>> frequent_tokens(np.array([5, 0, 9, 1]), 2, always=(3,))
        array([2, 3])
    """
    if not len(set(always)) <= size <= len(counts_V):
        raise DraftError(
            f"draft vocabulary of {size:,} is not between {len(set(always))} forced ids and the "
            f"target's {len(counts_V):,} tokens; set draft.draft_vocab_size"
        )
    ranked = np.argsort(-np.asarray(counts_V), kind="stable")
    forced = np.unique(np.array(always, dtype=np.int64))
    others = ranked[~np.isin(ranked, forced)][: size - len(forced)]
    return np.sort(np.concatenate([forced, others])).astype(np.int64)


def _check_token_ids(spec: DraftSpec, ids: NDArray[np.int64] | None) -> Tensor | None:
    if spec.draft_vocab_size is None:
        return None
    found = 0 if ids is None else len(np.unique(ids))
    if ids is None or found != spec.draft_vocab_size or ids.max() >= spec.vocab_size:
        raise DraftError(
            f"draft.draft_vocab_size {spec.draft_vocab_size} needs as many distinct token ids "
            f"below {spec.vocab_size:,}, found {found}"
        )
    return torch.from_numpy(np.unique(ids))


@torch.no_grad()
def _silence_mask(model: DraftModel, mask_D: Tensor) -> None:
    """Make the first layer's MLP answer the mask token's embedding with its negative.

    Every slot to draft enters as the same mask row, and the residual stream would carry it to
    the head, where it reads as one confident wrong token. A rank-one change of the down
    projection cancels it, so that a new drafter's output comes from the context alone.
    """
    layer: Any = model.layers[0]
    mlp = layer.mlp
    normed_D = layer.post_attention_layernorm(mask_D)
    inner = F.silu(mlp.gate_proj(normed_D)) * mlp.up_proj(normed_D)
    wrong_D = -mask_D - mlp.down_proj(inner)
    mlp.down_proj.weight += torch.outer(wrong_D, inner) / inner.square().sum().clamp(min=1e-12)


def _output_norm(model: DraftModel, target: TargetLike) -> Tensor:
    """Return the target's final norm weight, scaled so that first logits are not loud.

    A new drafter's output points nowhere in particular: for such a direction, logsumexp(logits) -
    mean(logits) is what the first loss is, and grows with the scale from ln(vocabulary) on.
    """
    head_VD = model.head_weight(target.lm_head.weight.detach()).float().cpu()
    weight_D = _final_norm(target, head_VD.shape[1])
    generator = torch.Generator().manual_seed(0)
    directions_SD = torch.randn(4, head_VD.shape[1], generator=generator)
    directions_SD /= directions_SD.square().mean(-1, keepdim=True).sqrt()
    logits_SV = (directions_SD * weight_D) @ head_VD.T

    def excess(scale: float) -> float:
        scaled = model.scale_logits(logits_SV * scale).double()
        over = scaled.logsumexp(-1) - scaled.mean(-1) - np.log(scaled.shape[-1])
        return float(over.mean())

    low, high = 0.0, 1.0
    if excess(high) <= INITIAL_EXCESS:
        return weight_D
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) <= INITIAL_EXCESS else (low, middle)
    return weight_D * low


def _final_norm(target: TargetLike, width: int) -> Tensor:
    decoder = target.model.get_decoder() if hasattr(target.model, "get_decoder") else target.model
    norm = getattr(decoder, "norm", None)
    weight = getattr(norm, "weight", None)
    if norm is None or weight is None or weight.shape != (width,):
        return torch.ones(width)
    return norm_scale(norm, width)


def _text_config(target: TargetLike) -> Any:
    return target.model.config.get_text_config()


def _head_dim(text: Any) -> int:
    return _of_all_layers(text, "head_dim") or text.hidden_size // text.num_attention_heads


def _key_value_heads(text: Any, heads: int) -> int:
    wanted = _of_all_layers(text, "num_key_value_heads") or heads
    return wanted if heads % wanted == 0 else heads


def _of_all_layers(text: Any, name: str) -> Any:
    """Return a size that a drafter's setting of the same name overrides."""
    try:
        size = getattr(text, name, None)
    except RuntimeError:  # configs of layers that differ refuse to name one
        size = ()
    if isinstance(size, list | tuple):
        raise DraftError(
            f"the layers of this {text.model_type} target differ in {name}; set draft.{name} to "
            "what the drafter's layers get"
        )
    return size


def _control_ids(target: TargetLike) -> dict[int, str]:
    """Return ids that must not be the mask token, with what they are."""
    found: dict[int, str] = {}
    sources = [target.tokenizer, target.model.config, target.model.generation_config]
    for source in sources:
        for name in ("pad", "bos", "eos", "unk"):
            ids = getattr(source, f"{name}_token_id", None)
            for token_id in ids if isinstance(ids, list | tuple) else [ids]:
                if token_id is not None:
                    found.setdefault(int(token_id), name)
    return found
