"""Answers from a target in this process, for `dflash_core.corpus.answers.regenerate`."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_core.corpus.answers.endpoint import endpoint_generate
from dflash_core.corpus.answers.regenerate import Answer, Generate, TurnPrompt, seed_of
from dflash_core.corpus.config import CorpusConfig, RegenerateConfig
from dflash_core.corpus.masking.encoder import ChatEncoder
from dflash_core.decoding.config import Sampling
from dflash_core.decoding.plain import generate, stop_tokens
from dflash_core.threads import best_threads, cpu_threads

__all__ = ["chosen_generate", "target_generate", "to_answer"]

THOUGHT, CLOSED = "<think>", "</think>"
OPENED_THOUGHT = f"{THOUGHT}\n"


def chosen_generate(
    config: CorpusConfig, encoder: ChatEncoder, load: Callable[[], Any], *, api_key: str | None
) -> Generate:
    """Return what answers: the endpoint where one is set, else the target.

    Args:
        config: Settings of the corpus.
        encoder: Of the target.
        load: Loads the target; called only where it is to answer.
        api_key: The endpoint's, where it wants one.
    """
    if config.regenerate.endpoint is not None:
        return endpoint_generate(config, api_key=api_key)
    return target_generate(load(), config.regenerate, encoder)


def target_generate(
    target: Any, config: RegenerateConfig, encoder: ChatEncoder, *, seed: int = 0
) -> Generate:
    """Return a callable that has the target answer, in batches of like length.

    Args:
        target: The loaded target with its tokenizer.
        config: Limits and sampling; what it leaves open is the target's own generation_config's.
        encoder: Of the target.
        seed: Seed of sampling.
    """
    stops = stop_tokens(target, encoder)
    num_threads = best_threads(target)

    def chosen(name: str, neutral: float) -> Any:
        own = getattr(target.model.generation_config, name, None)
        return next((v for v in (getattr(config, name), own) if v is not None), neutral)

    sampling = Sampling(
        temperature=config.temperature, top_p=chosen("top_p", 1.0), top_k=chosen("top_k", 0)
    )

    def answer(prompts: Sequence[TurnPrompt]) -> list[Answer]:
        ids = [encoder.encode_prompt(p.messages, tools=p.tools or None) for p in prompts]
        texts: dict[int, NDArray[np.int64]] = {}
        for rows in _batches([len(prompt) for prompt in ids], config):
            with cpu_threads(num_threads):
                made = generate(
                    target,
                    [ids[row] for row in rows],
                    max_new_tokens=config.max_new_tokens,
                    batch_size=len(rows),
                    sampling=sampling,
                    repetition_penalty=chosen("repetition_penalty", 1.0),
                    seed=seed_of(seed, *((row, prompts[row].name) for row in rows)),
                    stop_token_ids=stops,
                )
            texts.update(zip(rows, made, strict=True))
        return [
            to_answer(encoder, prompt, texts[row].tolist(), stops)
            for row, prompt in enumerate(prompts)
        ]

    return answer


def _batches(lengths: Sequence[int], config: RegenerateConfig) -> Iterator[list[int]]:
    """Yield rows of like length whose slots, answers included, stay within the budget."""
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: lengths[row]):
        # Increasing lengths: the newcomer is the longest.
        slots = (lengths[row] + config.max_new_tokens) * (len(batch) + 1)
        if batch and slots > config.batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def to_answer(
    encoder: ChatEncoder, prompt: TurnPrompt, text: Sequence[int], stops: Sequence[int]
) -> Answer:
    """Return what the target said as a message that its template renders as it was said.

    Args:
        encoder: Encoder of the target.
        prompt: What was asked.
        text: Tokens of the answer.
        stops: Tokens that end one.
    """
    stopped = bool(text) and text[-1] in stops
    said = encoder.decode(text[:-1] if stopped else text)
    asked = encoder.prompt_text(prompt.messages, tools=prompt.tools or None)
    # A thought that the prompt opens belongs to the message, or the template would not see it.
    content = OPENED_THOUGHT + said if asked.endswith(OPENED_THOUGHT) else said
    if stopped:
        return Answer(content, "stop", len(text))
    if content.lstrip().startswith(THOUGHT) and CLOSED not in content:
        # Without its end a thought is none to the template, which might put an empty one before it.
        thought = content.lstrip().removeprefix(THOUGHT).strip()
        message = {"role": "assistant", "content": "", "reasoning_content": thought}
        template = encoder.finder(prompt.tools).template
        rendered = template.render([*prompt.messages, message], tools=prompt.tools or None)
        if rendered.startswith(asked + said.rstrip()):
            return Answer("", "length", len(text), reasoning_content=thought)
    return Answer(content, "length", len(text))
