"""Settings of the corpus: where chats come from, how they are encoded, what is answered anew."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from dflash_core.config import FrozenModel

__all__ = ["ROW_FIELDS", "CorpusConfig", "EndpointConfig", "PrepareConfig", "RegenerateConfig"]

ChatFormat = Literal[
    "auto", "messages", "sharegpt", "instruction", "history", "tree", "text", "tokenised"
]


class PrepareConfig(FrozenModel):
    """How chat rows become samples, and prompts."""

    format: ChatFormat = "auto"
    """What the rows are; each row's own format is detected when 'auto'."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Which key of a row is what, where it is called otherwise: {"messages": "traj"}."""
    max_length: int = Field(default=3_072, ge=2)
    """Longest sample in tokens."""
    oversize: Literal["truncate", "drop"] = "truncate"
    """What happens to longer ones; counted either way."""
    supervise: Literal["all_turns", "last_turn_only"] = "all_turns"
    """Which assistant turns carry loss."""
    max_reject_share: float = Field(default=0.05, ge=0, le=1)
    """Most input rows that may be rejected before the stage fails."""
    chat_template: Path | None = None
    """Jinja file of another chat template than the tokenizer's."""
    template_variables: dict[str, Any] = Field(default_factory=dict)
    """Values that the template sees in every rendering, such as {"enable_thinking": false}."""

    @field_validator("template_variables")
    @classmethod
    def _says_yes_or_no(cls, variables: dict[str, Any]) -> dict[str, Any]:
        # The environment and name=value words know text alone, and to a template "false" is true.
        known = {"true": True, "false": False, "none": None, "null": None}
        return {
            name: known.get(value.lower(), value) if isinstance(value, str) else value
            for name, value in variables.items()
        }


ROW_FIELDS = set(PrepareConfig.model_fields)


class EndpointConfig(FrozenModel):
    """Where the target is served, by any OpenAI-compatible server."""

    url: str = Field(pattern=r"^https?://")
    """Base address, such as http://host:8000/v1; OPENAI_API_KEY of the process is its key."""
    model: str = Field(min_length=1)
    """Name of the target there."""
    num_parallel: int = Field(default=32, ge=1)
    """Requests in flight."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait for one answer in seconds."""
    num_tries: int = Field(default=6, ge=1)
    """Tries of a request before the run stops; it can be resumed."""
    pause_s: float = Field(default=1.0, ge=0)
    """Wait before the second try in seconds, doubled each time."""


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
    endpoint: EndpointConfig | None = None
    """A server that answers; the target is loaded in this process when not given."""


class CorpusConfig(PrepareConfig):
    """Which chats are trained on, which are held out."""

    source: Literal["stdlib", "files"] = "stdlib"
    """The Python standard library of this machine, or chat files: what inputs say if not given."""
    inputs: tuple[Path, ...] = ()
    """Chat files or folders to train on."""
    held_out_inputs: tuple[Path, ...] = ()
    """Chat files or folders to evaluate on; a share of inputs is held out when not given."""
    held_out_percent: float = Field(default=5.0, gt=0, lt=100)
    """Share of conversations held out, by a hash of their content, when no files are given."""
    max_samples: int | None = Field(default=None, ge=1)
    """Most samples to train on, chosen by a hash of their id; all when not given."""
    max_held_out: int | None = Field(default=256, ge=1)
    """Most held-out samples."""
    regenerate: RegenerateConfig = RegenerateConfig()
    """Answers made anew by the target."""

    @model_validator(mode="before")
    @classmethod
    def _source_of_inputs(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("inputs") and "source" not in given:
            return {**given, "source": "files"}
        return given

    @model_validator(mode="after")
    def _source_and_inputs_agree(self) -> "CorpusConfig":
        if self.source == "files" and not self.inputs:
            raise ValueError(
                "source 'files' names no input; set corpus.inputs to chat files or folders, or "
                "corpus.source to 'stdlib'"
            )
        if self.source == "stdlib" and (self.inputs or self.held_out_inputs):
            name = "inputs" if self.inputs else "held_out_inputs"
            raise ValueError(
                f"source 'stdlib' reads no files, and {name} names {getattr(self, name)[0]}; "
                + ("leave corpus.source out" if self.inputs else "set corpus.inputs beside it")
            )
        return self
