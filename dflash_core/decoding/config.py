"""Settings of decoding and of the acceptance measurement."""

from typing import Annotated, Literal

from pydantic import Field

from dflash_core.config import FrozenModel

__all__ = ["EvaluationConfig", "Sampling"]


class Sampling(FrozenModel):
    """How the next token is chosen."""

    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Smallest set of most likely tokens with this mass."""
    top_k: int = Field(default=0, ge=0)
    """Most likely tokens that can be chosen; all when 0."""


class EvaluationConfig(FrozenModel):
    """How acceptance is measured."""

    max_new_tokens: int = Field(default=256, ge=2)
    """Most tokens generated for a prompt."""
    max_prompts: int | None = Field(default=None, ge=1)
    """Measure on the first prompts only; later turns of their chats are not counted."""
    batch_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(1,), min_length=1)
    """Prompts decoded together, no more than there are; speed is measured at each. Acceptance is
    that of the first; 1 is what wall-clock speed-up is usually stated for."""
    sampling: Sampling = Sampling()
    """Greedy by default, which is then held against the target alone."""
    seed: int = Field(default=0, ge=0)
    """Seed of sampling."""
    served_as: Literal["zlab", "speculators"] = "zlab"
    """Layout whose servers are stood in for: with a reduced draft vocabulary those of z-lab's
    propose from the target's whole head all the same, those of speculators from the reduced one."""
    compare_plain: bool = True
    """Also decode without the drafter: exactness when greedy, and the wall-clock speed-up."""
    tie_gap: float = Field(default=1e-5, ge=0, lt=1)
    """A greedy difference is no fault in float32 where the target's top two logits are closer than
    this share of the largest."""
    length_edges: tuple[int, ...] = (64, 256, 1024)
    """Prompt lengths in tokens between which acceptance is reported apart."""
