"""Key-value caches of target and drafter, cropped together after every verification.

Prompts of a batch accept different numbers of tokens, so a row's refused tokens leave holes. A
mask of valid columns covers them; columns that no row needs are cut at once, and when holes have
grown to a quarter the rows are pushed together again. Both caches hold the same columns: the
committed tokens before the newest one.

Layers that keep a running state (linear attention, Mamba, convolutions) cannot forget: where a
draft was refused, their state before the block is put back and the accepted tokens run once more.
The library's own `crop` takes back convolutions only, not recurrent states (transformers 5.24,
`LinearAttentionCacheLayerMixin.is_croppable`). That is exact, for one text at a time, and costs a
second forward, which servers do not need: measured speed-ups are lower than theirs.

Legend: B rows, L cached columns, K new tokens, F features, V vocabulary, H heads, E head width.
"""

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from dflash_core.draft.attention import visible_block
from dflash_core.draft.model import DraftModel, KeyValue
from dflash_core.errors import TargetError
from dflash_core.target.families import target_traits

__all__ = ["DecodingCache", "check_together", "drafts_together", "takes_padding"]

HOLES = 0.25
SPARE_COLUMNS = 16
COLUMNS = (DynamicLayer, LinearAttentionAndFullAttentionLayer)  # all that they were given
STATES = (LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)  # padding leaves them alone


def takes_padding(target: Any) -> bool:
    """Whether prompts of different lengths can be decoded together, padded on the left."""
    kinds = {type(layer) for layer in _library_cache(target.model.config).layers}
    return not kinds.isdisjoint(COLUMNS) and kinds <= {*COLUMNS, *STATES, DummyLayer}


def drafts_together(target: Any) -> bool:
    """Whether drafts of several texts can be verified at once."""
    return not _stateful(_library_cache(target.model.config))


def check_together(target: Any, num_rows: int) -> None:
    """Look whether a target can verify the drafts of as many texts at once.

    Raises:
        TargetError: It has running states, and the texts are several.
    """
    if num_rows > 1 and not drafts_together(target):
        raise TargetError(
            f"the target '{target.model.config.get_text_config().model_type}' keeps running "
            f"states, which can take back refused tokens of one text at a time, not of {num_rows}; "
            "set evaluation.batch_sizes to 1"
        )


class DecodingCache:
    """What target and drafter remember of a batch of texts.

    Raises:
        TargetError: The target keeps a cache of its own, or has running states and the texts that
            are drafted for are several.
    """

    def __init__(self, target: Any, num_rows: int, drafter: DraftModel | None = None) -> None:
        self.target = target
        self.drafter = drafter
        self.device = target.lm_head.weight.device
        config = target.model.config.get_text_config()
        if not target.model._supports_default_dynamic_cache():
            raise TargetError(
                f"the target '{config.model_type}' keeps a cache of its own kind, so it cannot be "
                "decoded here; measure acceptance on your server"
            )
        self._slides = target_traits(config).slides
        self.valid_BL = torch.zeros(num_rows, 0, dtype=torch.bool, device=self.device)
        self._target_cache = _library_cache(target.model.config)
        self._states = [] if drafter is None else _stateful(self._target_cache)
        self._before: list[Any] = []
        if drafter is not None:
            check_together(target, num_rows)
        # transformers 5.2x renames the argument and warns about the old name.
        accepted = inspect.signature(target.model.forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        self._context: list[KeyValue] = []
        self._new: _New | None = None

    @property
    def lengths_B(self) -> Tensor:
        """Committed tokens that are cached, of each row."""
        return self.valid_BL.sum(1)

    def verify(
        self, ids_BK: Tensor, real_BK: Tensor | None = None, *, last: bool = False
    ) -> Tensor:
        """Run the target over new tokens and return its logits, shape (B, K, V).

        Args:
            ids_BK: New tokens.
            real_BK: False on left padding; all are real when not given.
            last: Return only the logits of the last token, shape (B, 1, V).
        """
        real_BK = torch.ones_like(ids_BK, dtype=torch.bool) if real_BK is None else real_BK
        positions_BK = (self.lengths_B[:, None] + real_BK.long().cumsum(1) - 1).clamp(min=0)
        mask_BL = torch.cat([self.valid_BL, real_BK], dim=1)
        wanted = self.drafter.spec.target_layer_ids if self.drafter is not None else ()
        self._before = [copy.deepcopy(self._target_cache.layers[n]) for n in self._states]
        with _listening(self.target, wanted) as heard:
            mask = None if bool(mask_BL.all()) else mask_BL.long()
            logits = self._run(ids_BK, positions_BK, mask, num_logits=1 if last else 0)
        if wanted:
            features = torch.cat([heard[layer] for layer in wanted], dim=-1)
            self._new = _New(ids_BK, positions_BK, features)
        return logits

    def commit(self, keep_BK: Tensor) -> None:
        """Keep some of the tokens that were just verified, and forget the others."""
        if self._new is not None:
            if self._states and not bool(keep_BK.all()):
                keep_BK = self._run_again(self._new, int(keep_BK.sum()))
            self._remember(self._new, keep_BK.shape[1])
            self._new = None
        self.valid_BL = torch.cat([self.valid_BL, keep_BK], dim=1)
        columns = self.valid_BL.any(0).nonzero()
        self._take(slice(0, int(columns[-1]) + 1 if len(columns) else 0))
        needed = int(self.lengths_B.max()) if len(self.valid_BL) else 0
        # transformers counts a window in columns: there must be no hole within a row's.
        holes = self._slides and not bool(self.valid_BL[:, -1:].all())
        if holes or self.valid_BL.shape[1] * (1 - HOLES) > needed + SPARE_COLUMNS:
            self._push_together(needed)

    def draft(self, newest_B: Tensor, width: int) -> Tensor:
        """Return the drafter's hidden states of the slots after the newest token, (B, K - 1, D)."""
        assert self.drafter is not None
        drafter = self.drafter
        slots_K = torch.arange(width, device=self.device)
        noise_BKD = drafter.noise(newest_B, self.target.input_embeddings.weight, width=width)
        positions_BK = self.lengths_B[:, None] + slots_K
        hidden_BKD = drafter(noise_BKD, positions_BK, self._context, _CachedAttention(self, width))
        return hidden_BKD[:, 1:]

    def select(self, rows: Tensor) -> None:
        """Go on with some rows only."""
        rows = rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows
        self.valid_BL = self.valid_BL[rows]
        self._target_cache.reorder_cache(cast(torch.LongTensor, rows))
        self._context = [(key[rows], value[rows]) for key, value in self._context]

    def _run(
        self, ids_BK: Tensor, positions_BK: Tensor, mask: Tensor | None, *, num_logits: int
    ) -> Tensor:
        """Run the target on its cache and return logits of the last tokens, of all when 0."""
        output: Any = self.target.model(
            input_ids=ids_BK,
            attention_mask=mask,
            position_ids=positions_BK,
            **{self._cache_name: self._target_cache},
            use_cache=True,
            logits_to_keep=num_logits,
        )
        return output.logits

    def _run_again(self, new: "_New", kept: int) -> Tensor:
        """Go back to before the block and run what is kept of it; it is all kept then."""
        self._take(slice(0, self.valid_BL.shape[1]))
        for number, layer in zip(self._states, self._before, strict=True):
            self._target_cache.layers[number] = layer
        self._run(new.ids_BK[:, :kept], new.positions_BK[:, :kept], None, num_logits=1)
        return torch.ones_like(new.ids_BK[:, :kept], dtype=torch.bool)

    def _remember(self, new: "_New", width: int) -> None:
        """Add the first tokens' fused features to the drafter's context keys and values."""
        assert self.drafter is not None
        rows = new.positions_BK.shape[0]
        features = new.features_BKF[:, :width].flatten(0, 1).to(self.drafter.fc.weight.dtype)
        added = self.drafter.context(features, new.positions_BK[:, :width].flatten())
        parts = [
            (key.unflatten(0, (rows, -1)), value.unflatten(0, (rows, -1))) for key, value in added
        ]
        old = self._context or [(key[:, :0], value[:, :0]) for key, value in parts]
        self._context = [
            (torch.cat([old_key, key], dim=1), torch.cat([old_value, value], dim=1))
            for (old_key, old_value), (key, value) in zip(old, parts, strict=True)
        ]

    def _take(self, columns: slice) -> None:
        self.valid_BL = self.valid_BL[:, columns]
        for layer in _filled(self._target_cache):
            layer.keys, layer.values = layer.keys[:, :, columns], layer.values[:, :, columns]
        self._context = [(key[:, columns], value[:, columns]) for key, value in self._context]

    def _push_together(self, needed: int) -> None:
        order_BL = self.valid_BL.long().argsort(dim=1, stable=True)[:, -needed:]
        self.valid_BL = self.valid_BL.gather(1, order_BL)
        for layer in _filled(self._target_cache):
            layer.keys = _columns(layer.keys, order_BL[:, None, :, None], dim=2)
            layer.values = _columns(layer.values, order_BL[:, None, :, None], dim=2)
        index = order_BL[:, :, None, None]
        self._context = [
            (_columns(k, index, dim=1), _columns(v, index, dim=1)) for k, v in self._context
        ]


class _New(NamedTuple):
    ids_BK: Tensor
    positions_BK: Tensor
    features_BKF: Tensor


class _CachedAttention:
    """Block slots over cached context and their own block."""

    def __init__(self, cache: DecodingCache, width: int) -> None:
        assert cache.drafter is not None
        self.spec = cache.drafter.spec
        self.valid_BL = cache.valid_BL
        self.lengths_B = cache.lengths_B
        self.slots_K = torch.arange(width, device=cache.device)

    def __call__(self, query_NKHE: Tensor, own: KeyValue, context: KeyValue, layer: int) -> Tensor:
        """Return the attended values, shape (B, K, H, E)."""
        key, value = (
            torch.cat(pair, dim=1).transpose(1, 2) for pair in zip(context, own, strict=True)
        )
        out = F.scaled_dot_product_attention(
            query_NKHE.transpose(1, 2), key, value, attn_mask=self._mask(layer), enable_gqa=True
        )
        return out.transpose(1, 2)

    def _mask(self, layer: int) -> Tensor | None:
        """Return who is seen, shape (B, 1, K, L + K), or None for everyone."""
        causal, window = self.spec.causal(layer), self.spec.window(layer)
        if not causal and window is None and bool(self.valid_BL.all()):
            return None
        context = self.valid_BL[:, None, :].expand(-1, len(self.slots_K), -1)
        if window is not None:
            positions_BL = self.valid_BL.long().cumsum(1) - 1
            query_BK = self.lengths_B[:, None] + self.slots_K
            context = context & (query_BK[:, :, None] - positions_BL[:, None, :] < window)
        block = visible_block(
            self.slots_K[:, None], self.slots_K, causal=causal, window=window
        ).expand(len(context), -1, -1)
        return torch.cat([context, block], dim=-1)[:, None]


@contextmanager
def _listening(target: Any, layer_ids: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
    """Collect the outputs of decoder layers, exactly what a drafter is trained on."""
    heard: dict[int, Tensor] = {}

    def listen(layer: int) -> Any:
        def hook(module: Any, arguments: Any, output: Any) -> None:
            heard[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    layers = target.model.get_decoder().layers
    handles = [layers[layer].register_forward_hook(listen(layer)) for layer in layer_ids]
    try:
        yield heard
    finally:
        for handle in handles:
            handle.remove()


def _library_cache(config: Any) -> DynamicCache:
    """Return the library's cache, whose sliding layers keep all: a window may have holes here."""
    cache = DynamicCache(config=config)
    for number, layer in enumerate(cache.layers):
        if type(layer) is DynamicSlidingWindowLayer:
            cache.layers[number] = DynamicLayer()
        elif type(layer) is LinearAttentionAndSlidingWindowAttentionLayer:
            states = layer.number_of_states
            cache.layers[number] = LinearAttentionAndFullAttentionLayer(number_of_states=states)
    return cache


def _stateful(cache: DynamicCache) -> list[int]:
    """Return the layers that keep a running state."""
    forgets = (DynamicLayer, DummyLayer)
    return [number for number, layer in enumerate(cache.layers) if type(layer) not in forgets]


def _filled(cache: DynamicCache) -> list[Any]:
    layers: list[Any] = list(cache.layers)
    return [layer for layer in layers if type(layer) in COLUMNS and layer.get_seq_length() > 0]


def _columns(states: Tensor, index: Tensor, *, dim: int) -> Tensor:
    shape = [index.shape[i] if i == dim else size for i, size in enumerate(states.shape)]
    return states.gather(dim, index.expand(shape))
