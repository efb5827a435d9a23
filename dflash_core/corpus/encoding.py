"""What a chat was encoded with, in two words that stand beside every number measured with it."""

from typing import TYPE_CHECKING

from dflash_core.config import FrozenModel

if TYPE_CHECKING:
    from dflash_core.corpus.masking import ChatEncoder

__all__ = ["EncoderFacts"]

SWITCHES = ("enable_thinking", "thinking", "reasoning_effort")
OPENED, CLOSED = "<think>", "</think>"


class EncoderFacts(FrozenModel):
    """Template, variables and tokenizer of a store, of answers or of prompts."""

    digest: str
    """Hash of all that the ids and masks depend on."""
    thinking: str
    """What the template is told of thoughts, and how it lets an answer begin."""

    @classmethod
    def of(cls, encoder: "ChatEncoder") -> "EncoderFacts":
        """Return what an encoder is, as its own prompt shows it."""
        prompt = encoder.prompt_text([{"role": "user", "content": "Hi"}]).rstrip()
        before, _, thought = prompt.rpartition(OPENED)
        if before and thought == "":
            ends = "prompts open a thought"
        elif before and not thought.removesuffix(CLOSED).strip():
            ends = "prompts end with an empty thought"
        else:
            ends = "prompts hold no thought"
        told = encoder.variables
        switches = [f"{name} {told[name]}" for name in SWITCHES if name in told]
        return cls(digest=encoder.digest, thinking=", ".join([*switches, ends]))
