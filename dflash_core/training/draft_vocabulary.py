"""Which tokens a drafter with a reduced vocabulary can propose: counted once for a run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_core.artifacts import atomic_write
from dflash_core.corpus.store import TokenStore
from dflash_core.decoding.plain import stop_tokens
from dflash_core.draft.build import frequent_tokens
from dflash_core.errors import DraftError
from dflash_core.target.loading import Target
from dflash_core.training.config import TrainingJob

__all__ = ["draft_vocabulary", "read_draft_vocabulary"]

VOCABULARY_NAME = "draft_vocabulary.json"


def draft_vocabulary(
    job: TrainingJob, target: Target, store: TokenStore
) -> NDArray[np.int64] | None:
    """Return the store's most frequent supervised tokens, the target's stop tokens always included.

    Counting reads the whole store, so the run folder keeps the ids: a resumed run and its other
    ranks, which find the same ones if they come first, read them there.

    Args:
        job: The run; with ``draft.draft_vocab_size`` unset there is nothing to reduce.
        target: The target.
        store: Training samples.

    Raises:
        DraftError: The size does not fit the target's vocabulary.
    """
    size = job.draft.draft_vocab_size
    if size is None:
        return None
    file = job.run_dir / VOCABULARY_NAME
    made_of = {"store": store.content_hash, "size": size}
    kept = _read(file) if file.is_file() else {}
    if made_of.items() <= kept.items():
        return np.array(kept["token_ids"], dtype=np.int64)
    counts_V = store.supervised_token_counts(target.vocab_size)
    ids = frequent_tokens(counts_V, size, always=stop_tokens(target))
    covered = float(counts_V[ids].sum() / max(counts_V.sum(), 1))
    facts = {**made_of, "covered_share": covered, "token_ids": ids.tolist()}
    atomic_write(file, json.dumps(facts) + "\n")
    return ids


def read_draft_vocabulary(run_dir: Path) -> NDArray[np.int64]:
    """Return what a run's drafter can propose.

    Raises:
        DraftError: The run folder does not say.
    """
    file = run_dir / VOCABULARY_NAME
    if not file.is_file():
        raise DraftError(f"{run_dir} lacks {VOCABULARY_NAME}, which names its drafter's tokens")
    return np.array(_read(file)["token_ids"], dtype=np.int64)


def _read(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_bytes())
    except ValueError as error:
        raise DraftError(f"{file} is damaged: {error}; remove it") from None
