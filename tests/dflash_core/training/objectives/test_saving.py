"""A trained target as it is saved."""

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen3ForCausalLM

from dflash_core.training.objectives.saving import save_target


class WithBuffers(Qwen3ForCausalLM):
    def __init__(self, config) -> None:
        super().__init__(config)
        self.register_buffer("router_bias", torch.full((3,), 1 / 3))
        self.register_buffer("counter", torch.tensor(2**24 + 1))


def test_parameters_are_rounded_and_buffers_are_not(parts, tmp_path) -> None:
    model = WithBuffers.from_pretrained(parts / "target")
    tokenizer = AutoTokenizer.from_pretrained(parts / "target")
    save_target(model, tokenizer, model.state_dict(), tmp_path / "saved", {})
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    for name in ("router_bias", "counter"):
        assert torch.equal(stored.pop(name), model.state_dict()[name])
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
