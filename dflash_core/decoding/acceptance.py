"""Acceptance by real speculative decoding, held against the target alone.

Greedy output must be the target's own. In float32 a difference is a fault, unless the target's
two best logits at the first divergence are closer than a block and a single-step forward can be
expected to agree; in bfloat16 the share of identical texts is what can be said.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_core.config import changed
from dflash_core.decoding.config import EvaluationConfig
from dflash_core.decoding.plain import generate, stop_tokens
from dflash_core.decoding.prompts import Prompt
from dflash_core.decoding.report import (
    AcceptanceGroup,
    AcceptanceReport,
    Exactness,
    Speed,
    speed_facts,
)
from dflash_core.decoding.speculative import Generation, check_pair
from dflash_core.decoding.timing import BothSides, decode_both
from dflash_core.draft.model import DraftModel
from dflash_core.errors import DataError
from dflash_core.threads import best_threads, cpu_threads

__all__ = ["evaluate_drafter", "held_against_plain"]

ABSURD = 1e30  # logits beyond are masks that a model puts on tokens, not measures of rounding


def evaluate_drafter(
    target: Any,
    drafter: DraftModel,
    prompts: Sequence[Prompt],
    config: EvaluationConfig,
    *,
    on_progress: Callable[[int, int], None] | None = None,
    on_round: Callable[[], None] | None = None,
) -> AcceptanceReport:
    """Decode prompts with and without the drafter and report acceptance, exactness and speed.

    Args:
        target: The target.
        drafter: Its drafter.
        prompts: What to continue; later turns of their chats follow, each measured as a prompt.
        config: How long, how many first turns, how sampled.
        on_progress: Called with the number of texts that are finished, and that of all.
        on_round: Called before each verification, which is often.

    Raises:
        DataError: There is no prompt that fits, one is empty, or one is of another vocabulary.
        DraftError: Drafter and target do not fit together.
    """
    check_pair(target, drafter)
    with cpu_threads(best_threads(target)):
        prompts, num_left_out = _by_turns(
            target, list(prompts)[: config.max_prompts], config, on_round
        )
    sizes = list(dict.fromkeys(min(size, len(prompts)) for size in config.batch_sizes))
    done = 0

    def on_batch(count: int) -> None:
        nonlocal done
        done += count
        if on_progress is not None:
            on_progress(done, len(prompts) * len(sizes))

    listening = {"on_batch": on_batch, "on_round": on_round}
    with cpu_threads(best_threads(target)):
        measured = [
            decode_both(target, drafter, prompts, config, size, **listening) for size in sizes
        ]
        report = _report(target, drafter, prompts, config, measured)
    return changed(report, {"num_left_out": num_left_out})


def _by_turns(
    target: Any,
    prompts: Sequence[Prompt],
    config: EvaluationConfig,
    on_round: Callable[[], None] | None,
) -> tuple[list[Prompt], int]:
    """Return prompts with those of their chats' later turns, and how many had to be left out.

    A later turn is asked behind the target's own answer, as in the authors' harness. That answer
    is known before anything is measured: speculative decoding must give the same, and every
    drafter is then measured on the same prompts.
    """
    if not prompts:
        raise DataError("there is no prompt to evaluate on")
    stops = stop_tokens(target)
    found: list[Prompt] = []
    num_left_out = 0
    asked = list(prompts)
    while asked:
        fitting = _fitting(target, asked, config.max_new_tokens, needed=not found)
        num_left_out += len(asked) - len(fitting)
        found += fitting
        more = [(prompt, prompt.next_turn) for prompt in fitting if prompt.next_turn]
        answers = generate(
            target,
            [prompt.token_ids for prompt, _ in more],
            max_new_tokens=config.max_new_tokens,
            batch_size=max(config.batch_sizes),
            sampling=config.sampling,
            seed=config.seed,
            stop_token_ids=stops,
            on_round=on_round,
        )
        asked = []
        for (_, next_turn), answer in zip(more, answers, strict=True):
            try:
                asked.append(next_turn(answer.tolist(), stops))
            except DataError:  # of what the target said, which nobody can mend
                num_left_out += 1
    return found, num_left_out


def _fitting(
    target: Any, prompts: Sequence[Prompt], max_new_tokens: int, *, needed: bool
) -> list[Prompt]:
    """Return the prompts that leave room for an answer: beyond its positions a model is another."""
    rows = target.input_embeddings.weight.shape[0]
    for number, prompt in enumerate(prompts):
        highest = int(np.max(prompt.token_ids, initial=0))
        if highest >= rows:
            raise DataError(
                f"prompt {number} holds token {highest:,} but the target has {rows:,} tokens; make "
                "the prompts with the target's own tokenizer"
            )
    positions = getattr(target.model.config.get_text_config(), "max_position_embeddings", None)
    room = (positions or 2**31) - max_new_tokens
    kept = [prompt for prompt in prompts if len(prompt.token_ids) <= room]
    if needed and not kept:
        shortest = min(len(prompt.token_ids) for prompt in prompts)
        raise DataError(
            f"the shortest prompt has {shortest:,} tokens and with {max_new_tokens:,} new ones "
            f"leaves the target's {positions:,} positions; lower max_new_tokens or give other "
            "prompts"
        )
    return kept


def _report(
    target: Any,
    drafter: DraftModel,
    prompts: Sequence[Prompt],
    config: EvaluationConfig,
    measured: Sequence[BothSides],
) -> AcceptanceReport:
    block_size = drafter.spec.block_size
    drafted = measured[0].drafted
    lengths = [length for g in drafted.values() for length in g.acceptance_lengths]
    domains: dict[str, list[int]] = {}
    sizes: dict[str, list[int]] = {}
    for row in sorted(drafted):
        domains.setdefault(prompts[row].domain, []).append(row)
        label = _length_label(len(prompts[row].token_ids), config.length_edges)
        sizes.setdefault(label, []).append(row)
    exactness = None
    if config.compare_plain and config.sampling.temperature == 0:
        exactness = held_against_plain(target, prompts, measured, tie_gap=config.tie_gap)
    own, *more = (
        speed_facts(found.batch_size, found.drafted_times, found.plain_times) for found in measured
    )
    return AcceptanceReport(
        **own,
        more_speeds=tuple(Speed(**facts) for facts in more),
        overall=_group(drafted.values()),
        by_domain={name: _group(drafted[r] for r in rows) for name, rows in domains.items()},
        by_prompt_length={name: _group(drafted[r] for r in rows) for name, rows in sizes.items()},
        per_prompt=tuple(
            (sum(drafted[row].acceptance_lengths), len(drafted[row].acceptance_lengths))
            for row in sorted(drafted)
        ),
        histogram=tuple(np.bincount(lengths, minlength=block_size + 1)[1:].tolist()),
        block_size=block_size,
        max_new_tokens=config.max_new_tokens,
        temperature=config.sampling.temperature,
        dtype=str(target.lm_head.weight.dtype).removeprefix("torch."),
        served_as=config.served_as,
        exactness=exactness,
        encoder=prompts[0].encoder,
    )


def _group(generations: Iterable[Generation]) -> AcceptanceGroup:
    given = list(generations)
    rounds = [g.acceptance_lengths for g in given if g.acceptance_lengths]
    pooled = [length for lengths in rounds for length in lengths]
    return AcceptanceGroup(
        num_prompts=len(given),
        num_tokens=sum(len(g.token_ids) for g in given),
        num_verifications=len(pooled),
        tau=float(np.mean(pooled)) if pooled else 1.0,
        tau_mean=float(np.mean([np.mean(lengths) for lengths in rounds])) if rounds else 1.0,
    )


def _length_label(length: int, edges: Sequence[int]) -> str:
    """Return the name of a prompt length's class: up to an edge, or over the last one."""
    for edge in sorted(edges):
        if length <= edge:
            return f"<= {edge}"
    return f"> {max(edges)}" if edges else "all"


def held_against_plain(
    target: Any, prompts: Sequence[Prompt], measured: Sequence[BothSides], *, tie_gap: float
) -> Exactness:
    """Compare greedy texts with the target's own.

    Args:
        target: The target.
        prompts: What was continued.
        measured: Texts of both sides at each batch size.
        tie_gap: Distance of the top two logits, relative to the largest, below which either of
            them may be chosen.
    """
    pairs = [
        (prompts[row], found.drafted[row].token_ids, text)
        for found in measured
        for row, text in found.plain.items()
    ]
    gaps = [
        _gap_at_divergence(target, prompt, drafted, plain)
        for prompt, drafted, plain in pairs
        if not np.array_equal(drafted, plain)
    ]
    num_ties = sum(gap < tie_gap for gap in gaps)
    identical = len(pairs) - len(gaps)
    return Exactness(
        num_identical=identical,
        num_ties=num_ties,
        num_faults=len(gaps) - num_ties,
        identical_share=identical / len(pairs),
        largest_gap=max(gaps, default=0.0),
        tie_gap=tie_gap,
    )


@torch.inference_mode()
def _gap_at_divergence(
    target: Any, prompt: Prompt, drafted: NDArray[np.int64], plain: NDArray[np.int64]
) -> float:
    """Return the distance of the target's top two logits where two texts part, see `tie_gap`.

    Rounding errors of a logit grow with the hidden state and the head, so the largest logit of
    either sign is the yardstick: a model that scales its logits moves both alike.
    """
    shared = min(len(drafted), len(plain))
    differ = np.flatnonzero(drafted[:shared] != plain[:shared])
    first = int(differ[0]) if len(differ) else shared
    ids = np.concatenate([prompt.token_ids, plain[:first]]).astype(np.int64)
    device = target.lm_head.weight.device
    output = target.model(input_ids=torch.from_numpy(ids)[None].to(device), logits_to_keep=1)
    logits_V = output.logits[0, -1].float()
    top = logits_V.topk(2).values
    sizes_V = logits_V.abs()
    largest = sizes_V[sizes_V < ABSURD].max()
    return float((top[0] - top[1]) / largest) if largest > 0 else 0.0
