"""Answers written anew by the target, conversation by conversation, resumable at every moment.

A drafter learns to foretell the target's own text, so the answers of a data set are replaced by
what the target says to the same prompts, earlier answers included. The result is a JSONL file that
`prepare_store` reads. It grows by windows of conversations; a restart cuts it back to whole windows
and goes on there, so that batches, and with them the bytes, are those of an undisturbed run.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

from pydantic import Field

from dflash_core.artifacts import atomic_write, content_digest
from dflash_core.config import FrozenModel
from dflash_core.corpus.config import PrepareConfig
from dflash_core.corpus.masking.encoder import ChatEncoder
from dflash_core.corpus.masking.spans import Message
from dflash_core.corpus.preparing.assemble import check_rejects
from dflash_core.corpus.reading.chats import Conversation
from dflash_core.corpus.reading.conversations import Intake, iter_made
from dflash_core.errors import DataError

__all__ = [
    "Answer",
    "Generate",
    "RegenerateReport",
    "TurnPrompt",
    "regenerate_chats",
    "regenerate_files",
    "seed_of",
]

MOST_NAMED = 100  # refused conversations or rows that a report names
WINDOW = 256  # answered together: enough for full batches, little to lose when stopped


@dataclass(frozen=True)
class TurnPrompt:
    """What is to be answered.

    Attributes:
        messages: The messages so far, ending before the assistant's turn.
        tools: Schemas of the tools on offer.
        name: Which conversation and turn it is; what is drawn in sampling depends on it.
    """

    messages: tuple[Message, ...]
    tools: tuple[Message, ...] = ()
    name: str = ""


@dataclass(frozen=True)
class Answer:
    """What the target said.

    Attributes:
        content: Its text, without the end-of-turn token.
        finish_reason: ``stop``; ``length`` when it was cut off; ``refused`` when the server takes
            every prompt but this one.
        num_tokens: Tokens generated.
        reasoning_content: Its thoughts, where the server splits them off.
        refusal: Why it was refused.
    """

    content: str
    finish_reason: str
    num_tokens: int
    reasoning_content: str | None = None
    refusal: str = ""

    @property
    def message(self) -> dict[str, Any]:
        """What it is in the chat that goes on behind it."""
        thought = {"reasoning_content": self.reasoning_content} if self.reasoning_content else {}
        return {"role": "assistant", "content": self.content, **thought}


Generate = Callable[[Sequence[TurnPrompt]], Sequence[Answer]]


class RegenerateReport(FrozenModel):
    """What was written anew."""

    num_conversations: int
    """Conversations in the file."""
    num_regenerated: int
    """Answers written anew."""
    num_kept: int
    """Answers that keep their text: tool calls, those of weight 0 and those not chosen."""
    num_cut_off: int
    """Answers cut off at max_new_tokens; their conversations end there."""
    num_tokens: int
    """Tokens generated."""
    num_refused: int = 0
    """Prompts that the server refused, such as too long ones; their conversations end before."""
    refused: list[str] = Field(default_factory=list)
    """The first of them: the conversation's id, and why."""
    num_passed_over: int = 0
    """Input rows that could not be taken, or hold no chat."""
    passed_over: list[str] = Field(default_factory=list)
    """The first of them: row and file, and why."""


def regenerate_files(
    inputs: Sequence[Path],
    config: PrepareConfig,
    encoder: ChatEncoder,
    generate: Generate,
    out: Path,
    *,
    facts: Mapping[str, Any],
    choose: Callable[[Message], bool] = lambda answer: True,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> RegenerateReport:
    """Write the conversations of chat files with new answers.

    All rows are read once before the first answer: what is wrong with them costs no generation.

    Args:
        inputs: Files, or folders of files.
        config: Format of the rows, and how many of them may be refused.
        encoder: Of the target: a row whose prompts its template refuses is refused.
        generate: Answers a batch of prompts.
        out: The file, as `regenerate_chats` writes it.
        facts: As `regenerate_chats` takes them.
        choose: Which assistant messages are written anew.
        on_progress: Called after each window with the conversations done and those there are.

    Raises:
        DataError: More rows cannot be taken than ``config.max_reject_share``; they then stand in
            ``<out's stem>.rejects.jsonl``. Or ``out`` was begun with other facts.
    """

    def renderable(item: Conversation) -> Conversation:
        asked = list(_with_answers(item))
        while asked and asked.pop()["role"] != "assistant":
            pass  # what is left is the longest prompt, which holds all others
        if asked:
            encoder.prompt_text(asked, tools=item.tools or None)
        return item

    intake = Intake()
    for _ in iter_made(inputs, config, renderable, intake=intake):
        pass
    beside = out.with_name(f"{out.stem}.rejects.jsonl")
    check_rejects(intake.rejects, intake.num_rows, config.max_reject_share, beside)
    return regenerate_chats(
        iter_made(inputs, config, renderable),
        generate,
        out,
        facts=facts,
        choose=choose,
        on_progress=lambda done: on_progress(done, intake.num_conversations),
        passed_over=intake.passed_over,
    )


def regenerate_chats(
    conversations: Iterable[Conversation],
    generate: Generate,
    out: Path,
    *,
    facts: Mapping[str, Any],
    choose: Callable[[Message], bool] = lambda answer: True,
    on_progress: Callable[[int], None] | None = None,
    passed_over: Sequence[str] = (),
) -> RegenerateReport:
    """Write conversations with new answers to a JSONL file of the messages format.

    Args:
        conversations: What to answer, the same in the same order on a restart.
        generate: Answers a batch of prompts.
        out: The file; ``<out>.meta.json`` beside it holds the facts and the report.
        facts: What the answers depend on: hashes of inputs and model, temperature, limits.
        choose: Which assistant messages are written anew; the others keep their text.
        on_progress: Called after each window with the conversations that are done.
        passed_over: Rows that gave no conversation, and why, for the report.

    Raises:
        DataError: ``out`` was begun with other facts, or another process writes it.
    """
    meta = out.with_name(out.name + ".meta.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("ab") as file:
        _lock(file)
        done = _resume(out, meta, dict(facts))
        waiting = islice(conversations, done, None)
        while window := list(islice(waiting, WINDOW)):
            rows = _answer_window(window, generate, choose, start=done)
            file.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
            file.flush()
            os.fsync(file.fileno())
            done += len(window)
            if on_progress is not None:
                on_progress(done)
        report = _report(out, passed_over)
        _write_meta(meta, {"facts": dict(facts), "report": report.model_dump()})
    return report


def seed_of(seed: int, *names: object) -> int:
    """Return the seed of sampling for prompts of these names, below 2**31.

    A restart draws the same again, and no two prompts share their draws.
    """
    return int(content_digest(seed, names)[:8], 16) % 2**31


def _lock(file: IO[bytes]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(
            f"another process is writing {file.name}; wait for it or give another --out"
        ) from None


def _resume(out: Path, meta: Path, facts: dict[str, Any]) -> int:
    """Cut the file back to whole windows and return the conversations it then holds."""
    if not (meta.is_file() and out.stat().st_size):
        os.truncate(out, 0)
        _write_meta(meta, {"facts": facts})
        return 0
    before = json.loads(meta.read_bytes())
    if before["facts"] != json.loads(json.dumps(facts)):
        changed = sorted(k for k in facts if before["facts"].get(k) != facts[k]) or ["facts"]
        raise DataError(
            f"{out} was begun with another {', '.join(changed)}; remove it, or give the settings "
            "it was begun with"
        )
    if "report" in before:
        return before["report"]["num_conversations"]
    ends = [0]
    with out.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                ends.append(ends[-1] + len(line))
    whole = (len(ends) - 1) // WINDOW * WINDOW
    os.truncate(out, ends[whole])
    return whole


def _write_meta(meta: Path, value: Mapping[str, Any]) -> None:
    atomic_write(meta, json.dumps(value, indent=1, default=str) + "\n")


@dataclass
class _Dialogue:
    """A conversation being written anew: what is said so far, and what is still to come."""

    source: Conversation
    number: int
    said: list[Message]
    coming: list[Message]
    turns: list[dict[str, Any]]


def _answer_window(
    window: Sequence[Conversation],
    generate: Generate,
    choose: Callable[[Message], bool],
    *,
    start: int,
) -> list[dict[str, Any]]:
    dialogues = [
        _Dialogue(item, number, [], list(_with_answers(item)), [])
        for number, item in enumerate(window, start)
    ]
    while True:
        asking = [dialogue for dialogue in dialogues if _advance(dialogue, choose)]
        if not asking:
            return [_row(dialogue) for dialogue in dialogues]
        prompts = [
            TurnPrompt(tuple(d.said), d.source.tools, f"{d.number}.{len(d.said)}") for d in asking
        ]
        for dialogue, answer in zip(asking, generate(prompts), strict=True):
            _say(dialogue, answer)


def _with_answers(item: Conversation) -> Iterator[Message]:
    """Yield the messages, with an empty answer to each prompt that has none."""
    for k, message in enumerate(item.messages):
        yield message
        following = item.messages[k + 1]["role"] if k + 1 < len(item.messages) else None
        prompts_only = not any(m["role"] == "assistant" for m in item.messages)
        if prompts_only and message["role"] == "user" and following in (None, "user"):
            yield {"role": "assistant", "content": ""}


def _advance(dialogue: _Dialogue, choose: Callable[[Message], bool]) -> bool:
    """Say what stands fixed; return whether an answer is to be generated next."""
    while dialogue.coming:
        message = dialogue.coming[0]
        fixed = message.get("tool_calls") or message.get("weight") == 0
        if message["role"] == "assistant" and not fixed and choose(message):
            return True
        if message["role"] == "assistant":
            dialogue.turns.append({"message": len(dialogue.said), "kept": True})
        dialogue.said.append(dialogue.coming.pop(0))
    return False


def _say(dialogue: _Dialogue, answer: Answer) -> None:
    if answer.finish_reason == "refused":
        # What was answered before stays; `prepare_store` names a row without any answer.
        refused = {"message": len(dialogue.said), "kept": False, "refused": answer.refusal}
        dialogue.turns.append(refused)
        dialogue.coming.clear()
        answered = [k for k, said in enumerate(dialogue.said, 1) if said["role"] == "assistant"]
        del dialogue.said[max(answered, default=len(dialogue.said)) :]
        return
    message = answer.message
    dialogue.coming.pop(0)
    if answer.finish_reason == "length":
        # Nobody answers half a sentence: the conversation ends here, without an end-of-turn token.
        message["cut_off"] = True
        dialogue.coming.clear()
    dialogue.turns.append(
        {
            "message": len(dialogue.said),
            "kept": False,
            "finish_reason": answer.finish_reason,
            "num_tokens": answer.num_tokens,
        }
    )
    dialogue.said.append(message)


def _row(dialogue: _Dialogue) -> dict[str, Any]:
    source = dialogue.source
    row: dict[str, Any] = {
        "id": source.row_id,
        "domain": source.domain,
        "messages": dialogue.said,
        "regenerated": dialogue.turns,
    }
    if source.tools:
        row["tools"] = list(source.tools)
    if source.group:
        row["group"] = source.group
    return row


def _report(out: Path, passed_over: Sequence[str]) -> RegenerateReport:
    conversations = kept = regenerated = cut_off = tokens = 0
    refused: list[str] = []
    with out.open("rb") as file:
        for line in file:
            conversations += 1
            row = json.loads(line)
            for turn in row["regenerated"]:
                if "refused" in turn:
                    refused.append(f"{row['id']}: {turn['refused']}")
                    continue
                kept += turn["kept"]
                regenerated += not turn["kept"]
                cut_off += turn.get("finish_reason") == "length"
                tokens += turn.get("num_tokens", 0)
    return RegenerateReport(
        num_conversations=conversations,
        num_regenerated=regenerated,
        num_kept=kept,
        num_cut_off=cut_off,
        num_tokens=tokens,
        num_refused=len(refused),
        refused=refused[:MOST_NAMED],
        num_passed_over=len(passed_over),
        passed_over=list(passed_over[:MOST_NAMED]),
    )
