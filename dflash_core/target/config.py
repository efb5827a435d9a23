"""Settings of the target model."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from dflash_core.config import FrozenModel

__all__ = ["Dtype", "TargetConfig"]

Dtype = Literal["float32", "bfloat16"]


class TargetConfig(FrozenModel):
    """Which model is drafted for, and which of its layers feed the drafter."""

    path: Path
    """A transformers folder: config.json, safetensors, tokenizer."""
    layer_ids: tuple[int, ...] | None = None
    """Decoder layers that feed the drafter; the published rule when not given."""
    num_features: int = Field(default=5, ge=1)
    """Layers that the published rule picks when layer_ids is not given."""
    dtype: Dtype = "float32"
    """Precision the target runs in."""
    attention: Literal["auto", "sdpa", "eager", "flex_attention", "flash_attention_2"] = "auto"
    """Attention implementation of the target; 'auto' is SDPA where transformers has it for the
    architecture, and eager elsewhere."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder."""

    @property
    def attn_implementation(self) -> str | None:
        """The attention as transformers names it; None has it choose."""
        return None if self.attention == "auto" else self.attention
