"""Write a drafter for a server, read it back, and only then give it its final name."""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_core.artifacts import atomic_write, check_replaceable, new_artifact
from dflash_core.draft.build import TargetLike
from dflash_core.draft.model import DraftModel
from dflash_core.errors import DraftError
from dflash_core.export.speculators import speculators_config, speculators_tensors
from dflash_core.export.zlab import CONFIG_NAME, WEIGHTS_NAME, load_drafter, zlab_config

__all__ = ["DRAFTER_KIND", "DRAFTER_VERSION", "Layout", "export_drafter"]

DRAFTER_KIND = "drafter"
DRAFTER_VERSION = 1

Layout = Literal["zlab", "speculators"]


def export_drafter(
    drafter: DraftModel,
    out: Path,
    *,
    layout: Layout = "zlab",
    dtype: torch.dtype | None = None,
    target: TargetLike | None = None,
    manifest: dict[str, Any] | None = None,
) -> Path:
    """Write a drafter in a layout that servers load, and compare what was written.

    The z-lab layout has no field for a reduced draft vocabulary: such a drafter proposes from the
    target's whole head there, and its token ids stand in the manifest for a later export to
    speculators, which carries them.

    Args:
        drafter: The drafter.
        out: Folder; an earlier drafter there is replaced, anything else is refused.
        layout: ``zlab`` or ``speculators``.
        dtype: Precision of the stored weights; the drafter's own when not given.
        target: The target, whose embedding and head the speculators layout carries.
        manifest: JSON-able facts about the run, kept as the manifest's metadata.

    Raises:
        DraftError: Weights are not finite, or the target is missing.
        ArtifactError: ``out`` holds anything but an earlier drafter.
    """
    out = Path(out)
    check_replaceable(out, kind=DRAFTER_KIND)
    dtype = dtype or drafter.fc.weight.dtype
    if layout == "speculators":
        if target is None:
            raise DraftError("the speculators layout carries embedding and head: give the target")
        config = speculators_config(drafter.spec, target, dtype)
        tensors = speculators_tensors(drafter, target)
    else:
        config, tensors = zlab_config(drafter.spec, dtype), dict(drafter.state_dict())
    facts = {"layout": layout, **(manifest or {})}
    if drafter.draft_token_ids is not None:
        facts["draft_token_ids"] = drafter.draft_token_ids.tolist()
    stored = {name: _storable(name, tensor, dtype) for name, tensor in tensors.items()}
    kind, version = DRAFTER_KIND, DRAFTER_VERSION
    with new_artifact(out, kind=kind, format_version=version, metadata=facts) as scratch:
        atomic_write(scratch / CONFIG_NAME, json.dumps(config, indent=2, sort_keys=True) + "\n")
        save_file(stored, scratch / WEIGHTS_NAME, metadata={"format": "pt"})
        _compare(scratch, stored)
        if layout == "zlab":
            _compare_spec(scratch, drafter)
    return out


def _storable(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.detach().cpu().contiguous()
    if not torch.isfinite(tensor).all():
        raise DraftError(f"tensor {name} holds NaN or infinity; a drafter like this is not written")
    return tensor.detach().to("cpu", dtype).contiguous().clone()


def _compare(folder: Path, stored: dict[str, Tensor]) -> None:
    read = load_file(folder / WEIGHTS_NAME)
    if read.keys() != stored.keys() or any(not torch.equal(read[k], stored[k]) for k in stored):
        raise DraftError(f"{folder / WEIGHTS_NAME} reads back differently from what was written")


def _compare_spec(folder: Path, drafter: DraftModel) -> None:
    read = load_drafter(folder).spec
    wrote = drafter.spec.model_copy(update={"draft_vocab_size": None})
    if read != wrote:
        changed = [
            name for name in wrote.model_dump() if getattr(read, name) != getattr(wrote, name)
        ]
        raise DraftError(f"{folder / CONFIG_NAME} reads back with another {', '.join(changed)}")
