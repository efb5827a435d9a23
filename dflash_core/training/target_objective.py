"""Train the target itself: next-token cross-entropy on supervised tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dflash_core.corpus.store import TokenStore
from dflash_core.target.config import TargetConfig
from dflash_core.target.loading import load_target
from dflash_core.training.objective import MicroBatch, autocast
from dflash_core.training.saving import save_target

__all__ = ["TargetObjective"]


class TargetObjective:
    """Fine-tunes a target, or trains one from random weights when its folder holds none.

    Args:
        config: The target; a folder with config.json and tokenizer but no weights starts fresh.
        store: Samples.
        seed: Seed of fresh weights.
        device: Where it runs.
        precision: Precision of matrix products.
    """

    num_sums = 3  # loss, weight, correct

    def __init__(
        self,
        config: TargetConfig,
        store: TokenStore,
        *,
        seed: int,
        device: torch.device,
        precision: str,
    ) -> None:
        self._store = store
        self._device = device
        self._precision = precision
        if any(config.path.glob("*.safetensors")):
            target = load_target(config, device=device)
            self._model, self._tokenizer = target.model, target.tokenizer
        else:
            torch.manual_seed(seed)
            shape = AutoConfig.from_pretrained(config.path)
            self._model = AutoModelForCausalLM.from_config(
                shape, attn_implementation=config.attention
            ).to(device)
            self._tokenizer = AutoTokenizer.from_pretrained(config.path)
        self._model.float().train().requires_grad_(True)

    @property
    def module(self) -> nn.Module:
        """The target."""
        return self._model

    def run(self, micro_batch: MicroBatch) -> Tensor:
        """Add the gradient of the summed cross-entropy."""
        samples = [row[0] for row in micro_batch.samples(self._store)]
        shape = (len(samples), micro_batch.padded_length)
        ids = np.zeros(shape, dtype=np.int64)
        supervised = np.zeros(shape, dtype=np.bool_)
        real = np.zeros(shape, dtype=np.int64)
        for row, sample in enumerate(samples):
            length = len(sample.input_ids)
            ids[row, :length] = sample.input_ids
            supervised[row, :length] = sample.loss_mask
            real[row, :length] = 1
        ids_BT = torch.from_numpy(ids).to(self._device)
        labelled_BT = torch.from_numpy(supervised).to(self._device)[:, 1:]
        # Right padding is never seen by a real token of a causal model: no mask is needed, and
        # attention without one is faster.
        with autocast(self._device, self._precision):
            hidden_BTD = self._model.get_decoder()(ids_BT, use_cache=False).last_hidden_state
            logits_PV = self._model.get_output_embeddings()(hidden_BTD[:, :-1][labelled_BT])
        labels_P = ids_BT[:, 1:][labelled_BT]
        loss = F.cross_entropy(logits_PV.float(), labels_P, reduction="sum") * micro_batch.weight
        loss.backward()
        correct = (logits_PV.detach().argmax(-1) == labels_P).sum() * micro_batch.weight
        weight = len(labels_P) * micro_batch.weight
        return torch.tensor([float(loss.detach()), weight, float(correct)], dtype=torch.float64)

    def describe(self, sums: Tensor) -> dict[str, Any]:
        """Return loss and accuracy of next-token prediction."""
        weight = max(float(sums[1]), 1e-12)
        return {"loss": float(sums[0]) / weight, "accuracy": float(sums[2]) / weight}

    def save(self, run_dir: Path, facts: dict[str, Any]) -> Path:
        """Write a transformers folder with bfloat16 weights."""
        return save_target(self._model, self._tokenizer, run_dir / "target", facts)
