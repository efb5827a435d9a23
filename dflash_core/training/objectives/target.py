"""Train the target itself: next-token cross-entropy on supervised tokens."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dflash_core.corpus.store import TokenStore
from dflash_core.errors import ConfigError, TargetError
from dflash_core.target.check import check_logits
from dflash_core.target.families import target_traits
from dflash_core.target.loading import load_target
from dflash_core.target.rope import freeze_rope
from dflash_core.training.batches.length_groups import NUM_GROUPS
from dflash_core.training.batches.types import MicroBatch, read_rows
from dflash_core.training.config import TrainingJob
from dflash_core.training.features.source import check_documents_apart
from dflash_core.training.objectives.base import Outcome, autocast
from dflash_core.training.objectives.saving import save_target
from dflash_core.training.ranks.fsdp import spread
from dflash_core.training.ranks.groups import Ranks
from dflash_core.training.tokens import check_tokens

__all__ = ["TargetObjective"]

OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.index.json")


@dataclass(frozen=True)
class _Batch:
    """Rows of documents; ``label_BT`` marks tokens that are predicted from the one before."""

    ids_BT: Tensor
    label_BT: Tensor
    document_BT: Tensor
    position_BT: Tensor | None
    num_documents: int


class _NextToken(nn.Module):
    """Decoder and head as one module: what is gathered for one is there for the other."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._traits = target_traits(model.config.get_text_config())

    def forward(self, ids_BT: Tensor, label_BT: Tensor, position_BT: Tensor | None) -> Tensor:
        """Return logits of the labelled tokens, shape (P, V)."""
        # Right padding is never seen by a real token of a causal model: no mask is needed, and
        # attention without one is faster.
        decoded = self.model.get_decoder()(ids_BT, position_ids=position_BT, use_cache=False)
        hidden_PD = decoded.last_hidden_state[:, :-1][label_BT]
        return self._traits.logits(self.model.get_output_embeddings()(hidden_PD))


class TargetObjective:
    """Fine-tunes a target, or trains one from random weights when its folder holds none.

    Args:
        job: The run; a target folder with config.json and tokenizer but no weights starts fresh.
        store: Training samples.
        held_out: Held-out samples.
        ranks: This process among the others, over which the target may be spread.

    Raises:
        ConfigError: Rows are packed, and the target's tokens see beyond their document.
        DataError: A sample holds a token that the target does not have.
        TargetError: The folder cannot be loaded, its weights are no safetensors, or its own forward
            gives other logits.
    """

    num_sums = 3  # loss, weight, correct
    num_positions = 1

    def __init__(
        self,
        job: TrainingJob,
        store: TokenStore,
        held_out: TokenStore | None,
        ranks: Ranks,
    ) -> None:
        self._store = store
        self._held_out = held_out
        self._device = ranks.device
        self._precision = job.training.precision
        self._is_spread = ranks.spread is not None
        first = torch.device("cpu") if self._is_spread else ranks.device
        config = job.target
        if any(config.path.glob("*.safetensors")):
            target = load_target(config, device=first, checked=False)
            self._model, self._tokenizer = target.model, target.tokenizer
            if getattr(self._model, "is_quantized", False):
                raise ConfigError(
                    f"training.objective 'target' trains weights, but those of {config.path} are "
                    "quantised; set target.path to the model as it was before"
                )
        else:
            _check_no_weights(config.path)
            torch.manual_seed(job.training.seed)
            trust = config.trust_remote_code
            shape = AutoConfig.from_pretrained(config.path, trust_remote_code=trust)
            self._model = AutoModelForCausalLM.from_config(
                shape, attn_implementation=config.attn_implementation, trust_remote_code=trust
            ).to(first)
            freeze_rope(self._model)
            self._tokenizer = AutoTokenizer.from_pretrained(config.path, trust_remote_code=trust)
        vocab_size = len(self._model.get_input_embeddings().weight)
        check_tokens((store, held_out), ranks, vocab_size=vocab_size)
        self.guess_loss = math.log(vocab_size)
        self._model.requires_grad_(True)
        self._next_token = _NextToken(self._model)
        check_logits(
            self._model.eval(),
            lambda ids_1T: self._next_token(ids_1T, torch.ones_like(ids_1T[:, 1:]) > 0, None),
        )
        if self._is_spread:
            layers = self._model.get_decoder().layers
            spread(self._next_token, layers, ranks, precision=self._precision)
        self._model.float()
        if job.batching.strategy == "packed":
            check_documents_apart(self._model, self._logits)

    @property
    def module(self) -> nn.Module:
        """The target."""
        return self._model

    def prepare(self, micro_batch: MicroBatch) -> _Batch:
        """Lay samples out in rows."""
        store = self._held_out if micro_batch.held_out else self._store
        assert store is not None
        rows = read_rows(micro_batch, store)
        shape = (len(rows), micro_batch.padded_length)
        ids = np.zeros(shape, dtype=np.int64)
        label = np.zeros(shape, dtype=np.bool_)
        document = np.zeros(shape, dtype=np.int64)
        position = np.zeros(shape, dtype=np.int64)
        count = 0
        for row, samples in enumerate(rows):
            column = 0
            for sample in samples:
                end = column + len(sample.input_ids)
                ids[row, column:end] = sample.input_ids
                label[row, column + 1 : end] = sample.loss_mask[1:]
                document[row, column:end] = count
                position[row, column:end] = np.arange(end - column)
                column, count = end, count + 1
        packed = count > len(rows)
        return _Batch(
            ids_BT=torch.from_numpy(ids),
            label_BT=torch.from_numpy(label),
            document_BT=torch.from_numpy(document),
            # Positions that begin anew tell transformers where documents end.
            position_BT=torch.from_numpy(position) if packed else None,
            num_documents=count,
        )

    def run(
        self, micro_batch: MicroBatch, batch: Any, features_MF: Tensor | None, groups: Tensor
    ) -> Outcome:
        """Add the gradient of the summed cross-entropy."""
        assert isinstance(batch, _Batch)
        loss_P, correct = self._learn(batch, micro_batch.weight)
        sums = torch.tensor([float(loss_P.sum()), len(loss_P), correct], dtype=torch.float64)
        sums *= micro_batch.weight
        documents_P = batch.document_BT[:, 1:][batch.label_BT[:, 1:]]
        return _outcome(sums, loss_P.cpu().double(), documents_P, batch, groups)

    def idle(self) -> None:
        """Run two tokens with weight 0, where the target is spread."""
        if self._is_spread:
            tokens = torch.zeros(1, 2, dtype=torch.int64)
            self._learn(_Batch(tokens, tokens == 0, tokens, None, 1), 0.0)

    def _learn(self, batch: _Batch, weight: float) -> tuple[Tensor, float]:
        """Return the loss of each labelled token, and how many were predicted."""
        ids_BT = batch.ids_BT.to(self._device)
        label_BT = batch.label_BT.to(self._device)[:, 1:]
        position_BT = None if batch.position_BT is None else batch.position_BT.to(self._device)
        logits_PV = self._logits(ids_BT, position_BT, label_BT)
        labels_P = ids_BT[:, 1:][label_BT]
        loss_P = F.cross_entropy(logits_PV.float(), labels_P, reduction="none")
        if torch.is_grad_enabled():
            (loss_P.sum() * weight).backward()
        return loss_P.detach(), float((logits_PV.detach().argmax(-1) == labels_P).sum())

    def _logits(
        self, ids_BT: Tensor, position_BT: Tensor | None, label_BT: Tensor | None = None
    ) -> Tensor:
        """Return logits of labelled tokens, of all but the first when not given, shape (P, V)."""
        if label_BT is None:
            label_BT = torch.ones_like(ids_BT[:, 1:], dtype=torch.bool)
        self._model.train(torch.is_grad_enabled())  # measured without dropout
        with autocast(self._device, self._precision):
            return self._next_token(ids_BT, label_BT, position_BT)

    def describe(self, sums: Tensor) -> dict[str, Any]:
        """Return loss and accuracy of next-token prediction."""
        weight = max(float(sums[1]), 1e-12)
        return {"loss": float(sums[0]) / weight, "accuracy": float(sums[2]) / weight}

    def score(self, sums: Tensor) -> float:
        """Return the negative loss."""
        return -float(sums[0]) / max(float(sums[1]), 1e-12)

    def save(self, run_dir: Path, weights: dict[str, Tensor], facts: dict[str, Any]) -> Path:
        """Write a transformers folder with bfloat16 weights."""
        return save_target(self._model, self._tokenizer, weights, run_dir / "target", facts)


def _check_no_weights(path: Path) -> None:
    """Refuse weights that would be passed over for random ones."""
    found = [file.name for pattern in OTHER_WEIGHTS for file in sorted(path.glob(pattern))]
    if found:
        raise TargetError(
            f"{path} holds {found[0]} but no *.safetensors, the only weights that are read; save "
            "the model again with save_pretrained, or remove the file to train from random weights"
        )


def _outcome(
    sums: Tensor, loss_P: Tensor, documents_P: Tensor, batch: _Batch, groups: Tensor
) -> Outcome:
    both_P2 = torch.stack([loss_P, torch.ones_like(loss_P)], dim=1)
    by_sample = torch.zeros(batch.num_documents, 2, dtype=torch.float64)
    by_sample.index_add_(0, documents_P, both_P2)
    weight = float(sums[1] > 0)
    by_group = torch.zeros(NUM_GROUPS, 2, dtype=torch.float64)
    by_group.index_add_(0, groups, by_sample * weight)
    return Outcome(sums, by_group[:, :1], by_group[:, 1:], by_sample)
