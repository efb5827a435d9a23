"""What a chat was encoded with, in two words that stand beside every number measured with it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_core.artifacts import MANIFEST_NAME
from dflash_core.config import FrozenModel

if TYPE_CHECKING:
    from dflash_core.corpus.masking.encoder import ChatEncoder

__all__ = ["EncoderFacts", "encoder_in", "other_encoder"]

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


def encoder_in(folder: Path) -> EncoderFacts | None:
    """Return what the manifest of a store or a drafter says of its encoder; None if nothing."""
    file = folder / MANIFEST_NAME
    if not file.is_file():
        return None
    found = json.loads(file.read_bytes()).get("metadata", {}).get("encoder")
    return None if found is None else EncoderFacts.model_validate(found)


def other_encoder(drafter: Path, prompts: EncoderFacts | None) -> str:
    """Return a sentence where prompts are encoded otherwise than a drafter's training was, or ''.

    Args:
        drafter: Folder of the drafter, whose manifest may tell.
        prompts: Encoder of the prompts, where it is known.
    """
    trained = encoder_in(drafter)
    if trained is None or prompts is None or trained.digest == prompts.digest:
        return ""
    return (
        f"WARNING: the drafter was trained with another encoder ({trained.digest[:8]}: "
        f"{trained.thinking}) than the prompts' ({prompts.digest[:8]}: {prompts.thinking}), so its "
        "acceptance here is not what it was trained for; set corpus.chat_template and "
        "corpus.template_variables as in its training"
    )
