"""Find the drafter in whatever a user names: an export, a run, or one of its checkpoints."""

from pathlib import Path

import torch
from pydantic import ValidationError

from dflash_core.artifacts import MANIFEST_NAME, read_manifest
from dflash_core.config import changed
from dflash_core.draft.build import draft_spec
from dflash_core.draft.model import DraftModel
from dflash_core.errors import DraftError
from dflash_core.export.write import DRAFTER_KIND, DRAFTER_VERSION
from dflash_core.export.zlab import CONFIG_NAME, check_tensors, load_drafter
from dflash_core.target.loading import load_target
from dflash_core.training.checkpoint import STATE_NAME, open_checkpoint
from dflash_core.training.config import TrainingJob
from dflash_core.training.draft_vocabulary import read_draft_vocabulary

__all__ = ["load_checkpoint_drafter"]


def load_checkpoint_drafter(path: Path) -> DraftModel:
    """Load a drafter from a z-lab folder, a run folder, or a checkpoint inside one.

    Args:
        path: A folder with ``config.json``; a run folder, whose ``drafter/`` is taken; or
            ``RUN/checkpoints/step-...``, whose shape comes from the run's ``job.json``.

    Raises:
        DraftError: It is none of these, or the weights do not fit the shape.
    """
    if not path.is_dir():
        raise DraftError(f"there is no folder {path}; name a drafter, a run or a checkpoint")
    for folder in (path, path / "drafter"):
        if (folder / CONFIG_NAME).is_file():
            return _as_trained(folder)
    job_file = path.parent.parent / "job.json"
    if not (path / STATE_NAME).is_file() or not job_file.is_file():
        raise DraftError(
            f"{path} is no drafter: it has neither {CONFIG_NAME} nor drafter/, and is no "
            "checkpoint of a run"
        )
    state = open_checkpoint(path)
    try:
        job = TrainingJob.model_validate_json(job_file.read_bytes())
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise DraftError(f"{job_file} describes no run: {problem}; train again") from None
    if job.training.objective != "draft":
        raise DraftError(f"{path} is a checkpoint of the target, not of a drafter")
    spec = draft_spec(job.draft, load_target(job.target, layers=False))
    ids = None if spec.draft_vocab_size is None else read_draft_vocabulary(path.parent.parent)
    model = DraftModel(spec, None if ids is None else torch.from_numpy(ids))
    tensors = state["module"]
    check_tensors(path, tensors, {k: v.shape for k, v in model.state_dict().items()})
    model.load_state_dict(tensors)
    return model.eval()


def _as_trained(folder: Path) -> DraftModel:
    """Load a z-lab folder with the reduced vocabulary that only its manifest can name."""
    drafter = load_drafter(folder)
    if not (folder / MANIFEST_NAME).is_file():
        return drafter
    manifest = read_manifest(folder, kind=DRAFTER_KIND, format_version=DRAFTER_VERSION)
    ids = manifest.metadata.get("draft_token_ids")
    if ids is not None:
        drafter.spec = changed(drafter.spec, {"draft_vocab_size": len(ids)})
        drafter.draft_token_ids = torch.tensor(ids)
    return drafter
