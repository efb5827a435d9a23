"""Settings of the corpus: where chats come from and which of their answers are made anew."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from dflash_core.config import FrozenModel

__all__ = ["CorpusConfig", "PrepareConfig", "RegenerateConfig"]

ChatFormat = Literal[
    "auto", "messages", "sharegpt", "instruction", "history", "tree", "text", "tokenised"
]


class PrepareConfig(FrozenModel):
    """How chat rows become samples."""

    format: ChatFormat = "auto"
    """What the rows are; each row's own format is detected when 'auto'."""
    max_length: int = Field(default=3_072, ge=2)
    """Longest sample in tokens."""
    oversize: Literal["truncate", "drop"] = "truncate"
    """What happens to longer ones; counted either way."""
    supervise: Literal["all_turns", "last_turn_only"] = "all_turns"
    """Which assistant turns carry loss."""
    max_reject_share: float = Field(default=0.05, ge=0, le=1)
    """Most input rows that may be rejected before the stage fails."""
    chat_template: str | None = None
    """Jinja source of another chat template than the tokenizer's."""
    template_variables: dict[str, Any] = Field(default_factory=dict)
    """Values that the template sees in every rendering, such as enable_thinking."""


class RegenerateConfig(FrozenModel):
    """Answers written by the target itself: a drafter learns the target's own text."""

    enabled: bool = False
    """Regenerate answers at all."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Longest regenerated answer in tokens."""
    max_source_tokens: int | None = Field(default=None, ge=1)
    """Answers longer than this in tokens keep their text; all are regenerated when not given."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0 is greedy, as a drafter's texts are verified by default, whatever
    temperature the target's own generation_config.json proposes."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Smallest set of most likely tokens with this mass; the target's own when not given."""
    top_k: int | None = Field(default=None, ge=0)
    """Most likely tokens that can be chosen, all when 0; the target's own when not given."""
    repetition_penalty: float | None = Field(default=None, gt=0)
    """Divides the logits of tokens that stand before; the target's own when not given, which
    servers apply to greedy texts, too."""
    batch_tokens: int = Field(default=8_192, ge=1)
    """Token slots generated at the same time."""


class CorpusConfig(FrozenModel):
    """Which chats are trained on, which are held out."""

    source: Literal["stdlib", "files"] = "files"
    """The Python standard library of this machine, or chat files."""
    inputs: tuple[Path, ...] = ()
    """Chat files or folders to train on, for source 'files'."""
    held_out_inputs: tuple[Path, ...] = ()
    """Chat files or folders to evaluate on; a share of inputs is held out when not given."""
    held_out_percent: float = Field(default=5.0, gt=0, lt=100)
    """Share of conversations held out, by a hash of their content, when no files are given."""
    max_samples: int | None = Field(default=None, ge=1)
    """Most samples to train on, chosen by a hash of their id; all when not given."""
    max_held_out: int | None = Field(default=256, ge=1)
    """Most held-out samples."""
    format: ChatFormat = "auto"
    """What the rows of the files are; each row's own format is detected when 'auto'."""
    max_length: int = Field(default=3_072, ge=2)
    """Longest sample in tokens; longer ones are truncated, and counted."""
    supervise: Literal["all_turns", "last_turn_only"] = "all_turns"
    """Which assistant turns carry loss."""
    max_reject_share: float = Field(default=0.05, ge=0, le=1)
    """Most input rows that may be rejected before the stage fails."""
    regenerate: RegenerateConfig = RegenerateConfig()
    """Answers made anew by the target."""

    @property
    def prepare(self) -> PrepareConfig:
        """The part of these settings that concerns rows."""
        return PrepareConfig(
            format=self.format,
            max_length=self.max_length,
            supervise=self.supervise,
            max_reject_share=self.max_reject_share,
        )

    @model_validator(mode="after")
    def _inputs_given(self) -> "CorpusConfig":
        if self.source == "files" and not self.inputs:
            raise ValueError(
                "source 'files' names no input; set corpus.inputs to chat files or folders, or "
                "corpus.source to 'stdlib'"
            )
        return self
