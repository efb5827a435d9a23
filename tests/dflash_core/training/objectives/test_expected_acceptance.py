"""Held-out acceptance is what decoding the very same texts gives."""

from itertools import accumulate

import numpy as np
import pytest

from dflash_core.corpus.store import Sample, TokenStore, write_store
from dflash_core.decoding.plain import generate
from dflash_core.decoding.speculative import speculative_generate
from dflash_core.draft.anchors import MOST_SUPERVISED, opening
from dflash_core.draft.config import DraftConfig
from dflash_core.draft.model import DraftModel
from dflash_core.export.zlab import load_drafter
from dflash_core.target.loading import load_target
from dflash_core.training.checkpoint import checkpoint_path, load_checkpoint
from tests.dflash_core.training.conftest import MakeJob, read_steps, run_here

LENGTH = 32
FAST = {"learning_rate": 1e-2, "warmup_ratio": 0.0}


def test_expected_acceptance_is_the_tau_of_decoding_the_targets_own_texts(
    make_job: MakeJob, parts, tmp_path
) -> None:
    job = make_job(epochs=15, optimizer=FAST, validation={"every_steps": 99}, preflight=False)
    target = load_target(job.target)
    prompts = [sample.input_ids[:12] for sample in list(TokenStore.open(parts / "held_out"))[:8]]
    texts = generate(target, prompts, max_new_tokens=LENGTH, stop_token_ids=())
    both = [np.concatenate(pair).astype(np.int32) for pair in zip(prompts, texts, strict=True)]
    mask = np.arange(12 + LENGTH) >= 12
    write_store(tmp_path / "own", [Sample(ids, mask, "own", str(n)) for n, ids in enumerate(both)])
    own = {"store": tmp_path / "own", "held_out_store": tmp_path / "own"}
    run_here(job.model_copy(update={**own, "draft": DraftConfig(num_layers=1, block_size=8)}))
    last = read_steps(job)[-1]
    weights = load_checkpoint(checkpoint_path(job.run_dir / "checkpoints", last["step"]))["module"]
    drafter = DraftModel(load_drafter(job.run_dir / "drafter").spec)
    drafter.load_state_dict(weights)
    # Longer than the texts, so that no block is narrowed at their ends.
    given = {"max_new_tokens": LENGTH + 8, "stop_token_ids": ()}
    found = speculative_generate(target, drafter, prompts, **given)
    assert all(np.array_equal(g.token_ids[:LENGTH], t) for g, t in zip(found, texts, strict=True))
    committed = [list(accumulate(one.acceptance_lengths, initial=1)) for one in found]
    rounds = sum(int(np.searchsorted(ends, LENGTH)) for ends in committed)
    tau = (LENGTH - 1) * len(texts) / rounds
    assert tau > 1.5
    assert last["held_out_expected_acceptance"] == pytest.approx(tau, rel=1e-12)
    assert "expected_acceptance" not in last


def test_of_a_long_sample_the_opening_is_measured():
    mask = np.arange(5000) % 2 == 1
    assert np.flatnonzero(opening(mask)).tolist() == np.flatnonzero(mask)[:MOST_SUPERVISED].tolist()
