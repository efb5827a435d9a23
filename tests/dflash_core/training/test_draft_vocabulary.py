"""A reduced draft vocabulary in the training program, and what becomes of it afterwards."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dflash_core.corpus.store import TokenStore
from dflash_core.decoding.plain import generate
from dflash_core.decoding.speculative import speculative_generate
from dflash_core.errors import DraftError
from dflash_core.export.write import export_drafter
from dflash_core.export.zlab import load_drafter
from dflash_core.target.config import TargetConfig
from dflash_core.target.loading import load_target
from dflash_core.training.draft_vocabulary import draft_vocabulary
from dflash_core.training.drafter import load_checkpoint_drafter
from tests.dflash_core.training.conftest import (
    MakeJob,
    losses,
    read_steps,
    run_here,
    run_ranks,
    write_job,
)
from tests.tiny import TINY_LAYER_IDS

SIZE = 64


def reduced(job):
    draft = job.draft.model_copy(update={"draft_vocab_size": SIZE})
    return job.model_copy(update={"draft": draft})


@pytest.fixture
def target(parts):
    return load_target(TargetConfig(path=parts / "target", layer_ids=TINY_LAYER_IDS))


def test_it_trains_alike_on_every_topology_and_after_a_resume(make_job: MakeJob) -> None:
    alone = reduced(make_job(name="alone", keep_checkpoints=9))
    run_here(alone)
    trace = losses(alone)
    # A new drafter's loss is near the logarithm of what it chooses from.
    assert trace[0] < np.log(SIZE) + 1.5 < np.log(384)
    assert read_steps(alone)[0]["accuracy"] < 1
    apart = reduced(make_job(name="apart", num_ranks=2, num_target_ranks=1))
    assert run_ranks(apart) == [0, 0]
    assert losses(apart) == trace
    newest = sorted((alone.run_dir / "checkpoints").iterdir())[-1]
    newest.rename(alone.run_dir / "away")
    run_here(alone)
    assert losses(alone) == trace


def test_the_tokens_are_the_most_frequent_ones_and_the_stop_tokens(make_job, target, parts) -> None:
    job, store = reduced(make_job()), TokenStore.open(parts / "store")
    ids = draft_vocabulary(job, target, store)
    assert ids is not None
    counts = store.supervised_token_counts(target.vocab_size)
    left_out = np.setdiff1d(np.arange(target.vocab_size), ids)
    stops = {target.tokenizer.eos_token_id, target.model.config.eos_token_id}
    assert stops <= set(ids.tolist())
    assert counts[np.setdiff1d(ids, list(stops))].min() >= counts[left_out].max()
    again = draft_vocabulary(job, target, store)  # from the run folder
    assert again is not None
    assert again.tolist() == ids.tolist()
    stored = json.loads((job.run_dir / "draft_vocabulary.json").read_text())
    assert stored["covered_share"] == pytest.approx(counts[ids].sum() / counts.sum())


def test_one_run_is_exported_reduced_to_speculators_and_whole_to_zlab(
    make_job: MakeJob, target, tmp_path
) -> None:
    job = reduced(make_job(epochs=1))
    write_job(job)
    run_here(job)
    newest = sorted((job.run_dir / "checkpoints").iterdir())[-1]
    ids = json.loads((job.run_dir / "draft_vocabulary.json").read_text())["token_ids"]
    for source in (job.run_dir, job.run_dir / "drafter", newest):
        drafter = load_checkpoint_drafter(source)
        assert drafter.draft_token_ids is not None
        assert drafter.draft_token_ids.tolist() == ids
        out = export_drafter(
            drafter, tmp_path / f"spec-{source.name}", layout="speculators", target=target
        )
        tensors = load_file(out / "model.safetensors")
        assert torch.equal(tensors["lm_head.weight"], target.lm_head.weight[ids].bfloat16())
        assert (tensors["d2t"] + torch.arange(SIZE)).tolist() == ids
        whole = load_drafter(export_drafter(drafter, tmp_path / f"zlab-{source.name}"))
        assert whole.draft_token_ids is None
        assert whole.spec.draft_vocab_size is None
    prompt = TokenStore.open(job.store)[0].input_ids[:20]
    plain = generate(target, [prompt], max_new_tokens=16)
    for version in (drafter, whole):
        (text,) = speculative_generate(target, version, [prompt], max_new_tokens=16)
        assert text.token_ids.tolist() == plain[0].tolist()
    (job.run_dir / "draft_vocabulary.json").unlink()
    with pytest.raises(DraftError, match=r"lacks draft_vocabulary\.json"):
        load_checkpoint_drafter(newest)


def test_a_size_that_does_not_fit_is_named(make_job: MakeJob) -> None:
    job = make_job()
    draft = job.draft.model_copy(update={"draft_vocab_size": 400})
    with pytest.raises(DraftError, match="draft vocabulary of 400 is not between"):
        run_here(job.model_copy(update={"draft": draft}))
