"""Which decoder layers feed the drafter. No torch: settings are checked with it."""

from collections.abc import Sequence

from dflash_core.errors import TargetError

__all__ = ["published_layer_ids", "resolve_layer_ids"]


def published_layer_ids(num_layers: int, num_features: int) -> tuple[int, ...]:
    """Return the layers of the published rule (arXiv 2602.06036): second to third-to-last, evenly.

    Example:
        >>> published_layer_ids(36, 5)
        (1, 9, 17, 25, 33)
    """
    if num_features == 1:
        return (num_layers // 2,)
    step = (num_layers - 4) / (num_features - 1)
    return tuple(round(1 + index * step) for index in range(num_features))


def resolve_layer_ids(
    num_layers: int, num_features: int, layer_ids: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return the captured layers: as given, or by the published rule.

    Args:
        num_layers: Decoder layers of the target.
        num_features: Layers that the rule picks.
        layer_ids: Explicit layers; id ``i`` means the output of decoder layer ``i``, from 0.

    Raises:
        TargetError: A layer is named twice, does not exist or is the last; on shallow targets the
            rule names layers twice.
    """
    ids = tuple(layer_ids) if layer_ids else published_layer_ids(num_layers, num_features)
    origin = "target.layer_ids" if layer_ids else f"the rule for {num_features} features"
    wrong = [layer for layer in ids if not 0 <= layer < num_layers]
    if wrong:
        raise TargetError(
            f"{origin} names layer {wrong[0]}, but the target has layers 0..{num_layers - 1}; set "
            "target.layer_ids"
        )
    if num_layers - 1 in ids:
        # The authors' loop, transformers and SGLang read hidden_states[-1] there: another tensor.
        raise TargetError(
            f"{origin} names layer {num_layers - 1}, the target's last, which decoders read after "
            f"the final norm and training before it; set target.layer_ids to layers below "
            f"{num_layers - 1}"
        )
    if len(set(ids)) < len(ids):
        raise TargetError(
            f"{origin} gives {list(ids)} on a target of {num_layers} layers, which repeats a "
            "layer; set target.layer_ids to distinct layers or lower target.num_features"
        )
    return ids
