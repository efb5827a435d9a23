"""Rows that are token ids already: their padding, and which of them carry loss."""

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_core.errors import DataError

__all__ = ["to_tokens"]

# By their names here, in TRL, and in verl; labels of -100 carry no loss.
MASKS = ("loss_mask", "assistant_masks", "completion_mask", "response_mask", "labels")
IGNORED = -100


def to_tokens(row: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a row's ids and mask without its padding; loss is where every mask of it has loss.

    Raises:
        DataError: They are no lists of integers of one length, there is no mask, the labels are
            other tokens, or the padding lies between tokens.
    """
    masks = {name: row[name] for name in MASKS if row.get(name) is not None}
    real = row.get("attention_mask")
    lists = {"input_ids": row.get("input_ids"), **(masks or {MASKS[0]: None})}
    lists |= {} if real is None else {"attention_mask": real}
    for name, values in lists.items():
        if not isinstance(values, list) or not all(type(v) in (int, bool) for v in values):
            raise DataError(f"has no list of integers under '{name}' (a mask may be 'labels')")
        if len(values) != len(lists["input_ids"]):
            size = len(lists["input_ids"])
            raise DataError(f"has {size} token ids but a mask of {len(values)} ('{name}')")
    ids, labels = row["input_ids"], masks.get("labels", row["input_ids"])
    if any(label not in (IGNORED, token) for label, token in zip(labels, ids, strict=True)):
        raise DataError("has labels other than its own input_ids; give a loss_mask")
    idle = {name: IGNORED if name == "labels" else 0 for name in masks}
    flags = [[value != idle[name] for value in values] for name, values in masks.items()]
    mask = [int(all(flag)) for flag in zip(*flags, strict=True)]
    start, end = _real_tokens([1] * len(ids) if real is None else real)
    return tuple(ids[start:end]), tuple(mask[start:end])


def _real_tokens(attention_mask: Sequence[int]) -> tuple[int, int]:
    """Return where padding ends at the left and starts at the right."""
    start = next((k for k, real in enumerate(attention_mask) if real), 0)
    end = start + sum(map(bool, attention_mask))
    if not all(attention_mask[start:end]):
        raise DataError("has padding between its tokens ('attention_mask'); leave it out")
    return start, end
