"""Write a drafter for a server, read it back, and only then give it its final name."""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_core.artifacts import atomic_write, check_replaceable, new_artifact
from dflash_core.config import changed
from dflash_core.draft.build import TargetLike
from dflash_core.draft.model import DraftModel
from dflash_core.draft.spec import DraftSpec
from dflash_core.errors import DraftError
from dflash_core.export.speculators import speculators_config, speculators_tensors
from dflash_core.export.transformers import transformers_config, transformers_tensors
from dflash_core.export.zlab import CONFIG_NAME, WEIGHTS_NAME, load_drafter, zlab_config

__all__ = ["DRAFTER_KIND", "DRAFTER_VERSION", "Layout", "drafter_config", "export_drafter"]

DRAFTER_KIND = "drafter"
DRAFTER_VERSION = 1

Layout = Literal["zlab", "speculators", "transformers"]


def export_drafter(
    drafter: DraftModel,
    out: Path,
    *,
    layout: Layout = "zlab",
    dtype: torch.dtype = torch.bfloat16,
    target: TargetLike | None = None,
    manifest: dict[str, Any] | None = None,
) -> Path:
    """Write a drafter in a layout that servers load, and compare what was written.

    Only the speculators layout has fields for a reduced draft vocabulary: in the others such a
    drafter proposes from the target's whole head, and its token ids stand in the manifest for a
    later export to speculators.

    Args:
        drafter: The drafter.
        out: Folder; an earlier drafter there is replaced, anything else is refused.
        layout: ``zlab``, ``speculators`` or ``transformers``.
        dtype: Precision of the stored weights. Beside a bfloat16 target a server would load
            float32 ones in float16.
        target: The target, whose embedding and head the speculators layout carries.
        manifest: JSON-able facts about the run, kept as the manifest's metadata.

    Raises:
        DraftError: Weights are not finite, the target is missing, or the layout cannot say what
            the drafter is.
        ArtifactError: ``out`` holds anything but an earlier drafter.
    """
    out = Path(out)
    check_replaceable(out, kind=DRAFTER_KIND)
    config = drafter_config(drafter.spec, layout, dtype, target)
    tensors: dict[str, Tensor] = dict(drafter.state_dict())
    if layout == "transformers":
        tensors = transformers_tensors(drafter)
    elif target is not None and layout == "speculators":
        tensors = speculators_tensors(drafter, target)
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


def drafter_config(
    spec: DraftSpec, layout: Layout, dtype: torch.dtype, target: TargetLike | None = None
) -> dict[str, Any]:
    """Return the content of ``config.json``; see `export_drafter`.

    Raises:
        DraftError: The target is missing, or the layout cannot say what the drafter is.
    """
    if layout == "zlab":
        return zlab_config(spec, dtype)
    if layout == "transformers":
        return transformers_config(spec, dtype)
    if target is None:
        raise DraftError("the speculators layout carries embedding and head: give the target")
    return speculators_config(spec, target, dtype)


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
    wrote = changed(drafter.spec, {"draft_vocab_size": None})
    if read != wrote:
        other = [name for name in wrote.model_dump() if getattr(read, name) != getattr(wrote, name)]
        raise DraftError(f"{folder / CONFIG_NAME} reads back with another {', '.join(other)}")
