"""Answers from a target in this process, for `dflash_core.corpus.regenerate`."""

from collections.abc import Sequence
from typing import Any

from dflash_core.corpus.config import RegenerateConfig
from dflash_core.corpus.masking import ChatEncoder
from dflash_core.corpus.regenerate import Answer, Generate, TurnPrompt
from dflash_core.decoding.config import Sampling
from dflash_core.decoding.plain import generate, stop_tokens

__all__ = ["target_generate"]

OPENED_THOUGHT = "<think>\n"


def target_generate(target: Any, config: RegenerateConfig, *, seed: int = 0) -> Generate:
    """Return a callable that has the target answer, in batches of like length.

    Args:
        target: The loaded target with its tokenizer.
        config: Limits and temperature.
        seed: Seed of sampling.
    """
    encoder = ChatEncoder(target.tokenizer)
    stops = stop_tokens(target)

    def answer(prompts: Sequence[TurnPrompt]) -> list[Answer]:
        ids = [encoder.encode_prompt(p.messages, tools=p.tools or None) for p in prompts]
        longest = max(len(prompt) for prompt in ids) + config.max_new_tokens
        texts = generate(
            target,
            ids,
            max_new_tokens=config.max_new_tokens,
            batch_size=max(1, config.batch_tokens // longest),
            sampling=Sampling(temperature=config.temperature),
            seed=seed,
            stop_token_ids=stops,
        )
        return [
            _answer(encoder, prompt, text.tolist(), stops)
            for prompt, text in zip(prompts, texts, strict=True)
        ]

    return answer


def _answer(
    encoder: ChatEncoder, prompt: TurnPrompt, text: list[int], stops: tuple[int, ...]
) -> Answer:
    stopped = bool(text) and text[-1] in stops
    content = encoder.decode(text[:-1] if stopped else text)
    # A thought that the prompt opens belongs to the message, or the template would not see it.
    if encoder.prompt_text(prompt.messages, tools=prompt.tools or None).endswith(OPENED_THOUGHT):
        content = OPENED_THOUGHT + content
    return Answer(content, "stop" if stopped else "length", len(text))
