"""Distillation in the training program: one more feature, and the same losses wherever it runs."""

import pytest
import torch
from torch.nn import functional as F

from dflash_core.corpus.store import TokenStore
from dflash_core.draft.config import LossConfig
from dflash_core.draft.loss import decay_gamma, draft_hidden
from dflash_core.target.config import TargetConfig
from dflash_core.target.loading import load_target
from dflash_core.training.batches.types import MicroBatch
from dflash_core.training.config import TopologyConfig, TrainingJob
from dflash_core.training.features.source import OnlineFeatures, feature_shape
from dflash_core.training.objectives.drafter import DraftObjective
from tests.dflash_core.training.conftest import MakeJob, losses, run_here, run_ranks
from tests.tiny import TINY_LAYER_IDS

DISTILLED = LossConfig(kind="forward_kl")


def distilled(job: TrainingJob) -> TrainingJob:
    return job.model_copy(update={"loss": DISTILLED})


@pytest.mark.parametrize("packed", [False, True])
def test_the_loss_is_the_divergence_from_the_targets_own_logits(make_job, parts, packed) -> None:
    """Slot by slot from the whole target's logits; float32 sums in another order: 1e-4."""
    target = load_target(TargetConfig(path=parts / "target", layer_ids=TINY_LAYER_IDS))
    store = TokenStore.open(parts / "store")
    objective = DraftObjective(distilled(make_job()), target, store, None)
    rows, length = ([[0, 1, 2]], 600) if packed else ([[0], [1], [2]], 192)
    micro_batch = MicroBatch(rows, length, 192, weight=1.0, epoch=0)
    batch = objective.prepare(micro_batch)
    features_MF = OnlineFeatures(target, packed=packed, final_hidden=True)(micro_batch, batch)
    assert features_MF.shape == (len(batch.context_index_M), 4 * target.hidden_size)
    found = objective.run(micro_batch, batch, features_MF, torch.zeros(3, dtype=torch.int64))
    drafter, width = objective.drafter, objective.drafter.spec.feature_size
    embedding = target.input_embeddings.weight
    with torch.no_grad():
        hidden = draft_hidden(drafter, embedding, features_MF[:, :width], batch)
        drafted = (hidden @ target.lm_head.weight.T).log_softmax(-1)
        own = [
            target.model(input_ids=torch.tensor(store[index].input_ids[:192])[None].long()).logits
            for index in range(3)
        ]
    expected, weights = 0.0, 0.0
    for anchor, slot in batch.valid_NK.nonzero().tolist():
        document, position = batch.anchor_documents_N[anchor], batch.anchor_positions_N[anchor]
        said = own[document][0, position + slot - 1].log_softmax(-1)
        weight = 2.718281828 ** (-(slot - 1) / decay_gamma(4, DISTILLED))
        term = F.kl_div(drafted[anchor, slot], said, log_target=True, reduction="sum")
        expected, weights = expected + weight * float(term), weights + weight
    assert found.sums[:2].tolist() == pytest.approx([expected, weights], rel=1e-4)


def test_losses_are_the_same_on_every_topology_and_from_a_cache(make_job: MakeJob, tmp_path):
    alone = distilled(make_job(name="alone", epochs=3))
    run_here(alone)
    trace = losses(alone)
    assert sum(trace[-3:]) < sum(trace[:3])
    topology = {"kind": "disaggregated", "num_ranks": 3, "num_target_ranks": 2}
    for shard in (False, True):
        split = TopologyConfig.model_validate(topology | {"shard_target": shard})
        apart = distilled(make_job(name=f"apart-{shard}", epochs=3, topology=split))
        assert run_ranks(apart) == [0, 0, 0]
        assert losses(apart) == trace
    cache = {"features": "cache", "cache": {"path": tmp_path / "cache"}}
    plain = make_job(name="plain", **cache)
    run_here(plain)  # its features lack the final hidden state and must not be read
    cached = distilled(make_job(name="cached", epochs=3, **cache))
    run_here(cached)
    # Float32 logits of batches drawn anew; the epochs add up what differs: 4e-6 seen.
    assert losses(cached) == pytest.approx(trace, rel=1e-4)
    assert len(list((tmp_path / "cache").glob("[!.]*"))) == 4  # two losses, training and held out


def test_distillation_is_counted_in_the_features_width(parts) -> None:
    target = load_target(TargetConfig(path=parts / "target", layer_ids=TINY_LAYER_IDS))
    assert feature_shape(target, LossConfig()) == (3 * 32, torch.float32)
    assert feature_shape(target, DISTILLED) == (4 * 32, torch.float32)
