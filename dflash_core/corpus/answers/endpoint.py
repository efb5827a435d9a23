"""Answers from an OpenAI-compatible server: vLLM, SGLang, llama.cpp and the like."""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from dflash_core.corpus.answers.regenerate import Answer, Generate, TurnPrompt, seed_of
from dflash_core.corpus.config import CorpusConfig, EndpointConfig
from dflash_core.corpus.masking.spans import Message
from dflash_core.errors import ConfigError, DFlashError

__all__ = ["endpoint_generate"]

# What a server says when it may say otherwise later.
PASSING_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
# What it says to one prompt, such as a too long one; unless it says so to every prompt.
PROMPT_STATUS = frozenset({400, 413, 422})
# What messages carry for us alone.
OWN_KEYS = frozenset({"weight", "cut_off"})


def endpoint_generate(
    config: CorpusConfig, *, api_key: str | None = None, seed: int = 0
) -> Generate:
    """Return a callable that has the server at ``corpus.regenerate.endpoint`` answer.

    A prompt that the server refuses, while it takes others, has a ``refused`` answer.

    Args:
        config: The server, how it answers, and what its chat template is told, as ours is.
        api_key: Key of the server.
        seed: Seed of sampling, for servers that take one.

    Raises:
        ConfigError: (the callable) The server refuses the request as such, whatever the prompt.
        DFlashError: (the callable) The server did not answer after all tries.
    """

    answering, endpoint = config.regenerate, config.regenerate.endpoint
    assert endpoint is not None
    said_to_all: dict[str, Any] = {
        "model": endpoint.model,
        "temperature": answering.temperature,
        "max_tokens": answering.max_new_tokens,
        # What is not given is the server's business: its target's own generation_config.
        **answering.model_dump(include={"top_p", "top_k", "repetition_penalty"}, exclude_none=True),
    }
    if config.template_variables:
        said_to_all["chat_template_kwargs"] = config.template_variables

    def ask(prompt: TurnPrompt) -> Answer:
        body = {**said_to_all, "messages": _on_the_wire(prompt.messages)}
        body["seed"] = seed_of(seed, prompt.name)
        if prompt.tools:
            body |= {"tools": list(prompt.tools), "tool_choice": "none"}
        return _ask(body, endpoint, api_key)

    def generate(prompts: Sequence[TurnPrompt]) -> list[Answer]:
        with ThreadPoolExecutor(endpoint.num_parallel) as pool:
            answers = list(pool.map(ask, prompts))
        if all(answer.finish_reason == "refused" for answer in answers):
            for tools in {bool(prompt.tools): prompt.tools for prompt in prompts}.values():
                # Where even the shortest prompt is refused, it is not the prompts.
                shortest = ask(TurnPrompt(({"role": "user", "content": "Hi"},), tools))
                if shortest.finish_reason == "refused":
                    raise ConfigError(
                        f"{endpoint.url} refuses every prompt with {shortest.refusal}; mend the "
                        "model's name, the limits or the server's own settings"
                    )
        return answers

    return generate


def _ask(body: Mapping[str, Any], config: EndpointConfig, api_key: str | None) -> Answer:
    try:
        reply = _post(f"{config.url.rstrip('/')}/chat/completions", body, config, api_key)
    except _PromptRefused as refusal:
        return Answer("", "refused", 0, refusal=str(refusal))
    try:
        choice = reply["choices"][0]
        message = choice["message"]
        return Answer(
            content=message.get("content") or "",
            finish_reason=choice.get("finish_reason") or "stop",
            num_tokens=int((reply.get("usage") or {}).get("completion_tokens", 0)),
            reasoning_content=message.get("reasoning_content") or message.get("reasoning"),
        )
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ConfigError(
            f"{config.url} answers in another form than chat completions: "
            f"{json.dumps(reply)[:200]}; give the base address of an OpenAI-compatible server"
        ) from None


def _on_the_wire(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as OpenAI's schema has them: arguments as text, calls and results by id.

    Chats here keep no ids: results stand in the order of their calls. Nine letters and digits,
    because some templates take no other.
    """
    wired: list[dict[str, Any]] = []
    unanswered: list[str] = []
    num_calls = 0
    for message in messages:
        wire = {key: value for key, value in message.items() if key not in OWN_KEYS}
        if calls := message.get("tool_calls"):
            unanswered = [f"call{num_calls + k:05d}" for k in range(len(calls))]
            num_calls += len(calls)
            wire["tool_calls"] = [
                {"id": name, "type": "function", "function": _function(call["function"])}
                for name, call in zip(unanswered, calls, strict=True)
            ]
        elif message["role"] == "tool" and unanswered:
            wire["tool_call_id"] = unanswered.pop(0)
        wired.append(wire)
    return wired


def _function(called: Message) -> dict[str, Any]:
    given = called["arguments"]
    return {**called, "arguments": given if isinstance(given, str) else json.dumps(given)}


class _PromptRefused(Exception):
    """The server takes the request but not this prompt."""


def _post(url: str, body: Mapping[str, Any], config: EndpointConfig, api_key: str | None) -> Any:
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310
    reason = ""
    for attempt in range(config.num_tries):
        if attempt:
            time.sleep(config.pause_s * 2 ** (attempt - 1))
        try:
            with urllib.request.urlopen(request, timeout=config.timeout_s) as reply:  # noqa: S310
                return json.loads(reply.read())
        except urllib.error.HTTPError as error:
            reason = f"status {error.code}: {_beginning(error)}"
            if error.code in PROMPT_STATUS:
                raise _PromptRefused(reason) from None
            if error.code not in PASSING_STATUS:
                raise ConfigError(f"{url} refuses the request with {reason}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", error)).strip() or type(error).__name__
    raise DFlashError(
        f"{url} did not answer after {config.num_tries} tries ({reason}); start the server and run "
        "the same command again, it goes on where it stopped"
    )


def _beginning(refusal: urllib.error.HTTPError) -> str:
    """Return what a server says with its refusal, as far as it came."""
    with refusal, suppress(OSError, http.client.HTTPException):
        return refusal.read(300).decode(errors="replace")
    return refusal.reason
