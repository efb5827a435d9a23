"""Acceptance by real speculative decoding, held against the target alone.

Acceptance length is tokens committed per verification, the bonus token included. Two averages are
in use and differ: pooled over all verifications (what sets the speed of a server), and the mean
over texts of each text's own mean (what the paper's harness prints). Both are reported.

Greedy output must be the target's own. In float32 a difference is a fault, unless the target's
two best logits at the first divergence are closer than a block and a single-step forward can be
expected to agree; in bfloat16 the share of identical texts is what can be said.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from dflash_core.config import FrozenModel
from dflash_core.decoding.config import EvaluationConfig
from dflash_core.decoding.plain import generate
from dflash_core.decoding.prompts import Prompt
from dflash_core.decoding.speculative import Generation, check_pair, speculative_generate
from dflash_core.draft.model import DraftModel
from dflash_core.errors import DataError

__all__ = [
    "AcceptanceGroup",
    "AcceptanceReport",
    "Exactness",
    "evaluate_drafter",
    "held_against_plain",
]


class AcceptanceGroup(FrozenModel):
    """Acceptance over some of the prompts."""

    num_prompts: int
    """Prompts of the group."""
    num_tokens: int
    """New tokens of all prompts."""
    num_verifications: int
    """Target forwards that verified a block."""
    tau: float
    """Acceptance length pooled over all verifications."""
    tau_mean: float
    """Mean over prompts of each prompt's mean acceptance length."""


class Exactness(FrozenModel):
    """Greedy texts with the drafter against the target's own."""

    num_identical: int
    """Prompts with the same text."""
    num_ties: int
    """Prompts that differ from a place on where the target's top two logits are too close."""
    num_faults: int
    """Prompts that differ otherwise."""
    identical_share: float
    """Share of prompts with the same text."""
    largest_gap: float
    """Largest distance of the target's top two logits at a first divergence."""
    tie_gap: float
    """Distance below which a divergence counts as a tie."""


class AcceptanceReport(FrozenModel):
    """What a drafter is worth on some prompts."""

    overall: AcceptanceGroup
    """Over all prompts."""
    by_domain: dict[str, AcceptanceGroup] = Field(default_factory=dict)
    """By the prompts' domain."""
    by_prompt_length: dict[str, AcceptanceGroup] = Field(default_factory=dict)
    """By the prompts' length in tokens."""
    per_prompt: tuple[tuple[int, int], ...] = ()
    """Tokens committed and verifications of each prompt, in the prompts' order."""
    histogram: tuple[int, ...]
    """Verifications that committed 1, 2, ... block_size tokens."""
    block_size: int
    """Block size of the drafter."""
    max_new_tokens: int
    """Most tokens generated for a prompt."""
    batch_size: int
    """Prompts decoded together."""
    temperature: float
    """0 is greedy."""
    dtype: str
    """Precision of the target."""
    num_left_out: int = 0
    """Prompts that do not fit into the target's positions with as many new tokens."""
    served_as: str = "zlab"
    """Layout whose servers were stood in for."""
    exactness: Exactness | None = None
    """Greedy only, when compared with plain decoding."""
    speculative_tokens_per_s: float
    """New tokens per second with the drafter, prompts' forwards included."""
    plain_tokens_per_s: float | None = None
    """New tokens per second of the target alone in the same run."""
    speedup: float | None = None
    """Ratio of the two."""

    @property
    def tau(self) -> float:
        """Acceptance length pooled over all verifications."""
        return self.overall.tau

    @property
    def has_faults(self) -> bool:
        """Whether greedy texts in float32 differ from the target's own, ties set aside."""
        exact = self.exactness
        return self.dtype == "float32" and exact is not None and exact.num_faults > 0


def evaluate_drafter(
    target: Any,
    drafter: DraftModel,
    prompts: Sequence[Prompt],
    config: EvaluationConfig,
    *,
    on_prompts: Callable[[int], None] | None = None,
    on_round: Callable[[], None] | None = None,
) -> AcceptanceReport:
    """Decode prompts with and without the drafter and report acceptance.

    Plain and speculative decoding take turns batch by batch, so that a change of the machine's
    load meets both alike.

    Args:
        target: The target.
        drafter: Its drafter.
        prompts: What to continue.
        config: How long, how many, how sampled.
        on_prompts: Called with the number of prompts that were just finished.
        on_round: Called before each verification, which is often.

    Raises:
        DataError: There is no prompt that fits, one is empty, or one is of another vocabulary.
        DraftError: Drafter and target do not fit together.
    """
    check_pair(target, drafter)
    given = list(prompts)[: config.max_prompts]
    prompts = _fitting(target, given, config.max_new_tokens)
    order = sorted(range(len(prompts)), key=lambda row: -len(prompts[row].token_ids))
    drafted: dict[int, Generation] = {}
    plain: dict[int, NDArray[np.int64]] = {}
    seconds = {"drafted": 0.0, "plain": 0.0}
    for start in range(0, len(order), config.batch_size):
        rows = order[start : start + config.batch_size]
        texts = [prompts[row].token_ids for row in rows]
        begin = _now(target)
        results = speculative_generate(
            target,
            drafter,
            texts,
            max_new_tokens=config.max_new_tokens,
            batch_size=config.batch_size,
            sampling=config.sampling,
            seed=config.seed + start,
            whole_head=config.served_as == "zlab",
            on_round=on_round,
        )
        middle = _now(target)
        drafted.update(zip(rows, results, strict=True))
        seconds["drafted"] += middle - begin
        if config.compare_plain:
            alone = generate(
                target,
                texts,
                max_new_tokens=config.max_new_tokens,
                batch_size=config.batch_size,
                sampling=config.sampling,
                seed=config.seed + start,
            )
            plain.update(zip(rows, alone, strict=True))
            seconds["plain"] += _now(target) - middle
        if on_prompts is not None:
            on_prompts(len(rows))
    report = _report(target, drafter, prompts, config, drafted, plain, seconds)
    return report.model_copy(update={"num_left_out": len(given) - len(prompts)})


def _fitting(target: Any, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Prompt]:
    """Return the prompts that leave room for an answer: beyond its positions a model is another."""
    if not prompts:
        raise DataError("there is no prompt to evaluate on")
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
    if not kept:
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
    drafted: dict[int, Generation],
    plain: dict[int, NDArray[np.int64]],
    seconds: dict[str, float],
) -> AcceptanceReport:
    block_size = drafter.spec.block_size
    lengths = [length for g in drafted.values() for length in g.acceptance_lengths]
    domains: dict[str, list[int]] = {}
    sizes: dict[str, list[int]] = {}
    for row in sorted(drafted):
        domains.setdefault(prompts[row].domain, []).append(row)
        label = _length_label(len(prompts[row].token_ids), config.length_edges)
        sizes.setdefault(label, []).append(row)
    num_drafted = sum(len(g.token_ids) for g in drafted.values())
    num_plain = sum(len(text) for text in plain.values())
    drafted_rate = num_drafted / seconds["drafted"]
    plain_rate = num_plain / seconds["plain"] if plain else None
    exactness = None
    if plain and config.sampling.temperature == 0:
        exactness = held_against_plain(target, prompts, config, drafted, plain)
    return AcceptanceReport(
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
        batch_size=config.batch_size,
        temperature=config.sampling.temperature,
        dtype=str(target.lm_head.weight.dtype).removeprefix("torch."),
        served_as=config.served_as,
        exactness=exactness,
        speculative_tokens_per_s=drafted_rate,
        plain_tokens_per_s=plain_rate,
        speedup=None if plain_rate is None else drafted_rate / plain_rate,
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
    target: Any,
    prompts: Sequence[Prompt],
    config: EvaluationConfig,
    drafted: dict[int, Generation],
    plain: dict[int, NDArray[np.int64]],
) -> Exactness:
    """Compare greedy texts with the target's own.

    Args:
        target: The target.
        prompts: What was continued.
        config: Names the gap that counts as a tie.
        drafted: Text of each prompt with the drafter, by index.
        plain: Text of each prompt by the target alone, by index.
    """
    gaps = []
    for row, text in plain.items():
        if np.array_equal(drafted[row].token_ids, text):
            continue
        gaps.append(_gap_at_divergence(target, prompts[row], drafted[row].token_ids, text))
    num_ties = sum(gap < config.tie_gap for gap in gaps)
    identical = len(plain) - len(gaps)
    return Exactness(
        num_identical=identical,
        num_ties=num_ties,
        num_faults=len(gaps) - num_ties,
        identical_share=identical / len(plain),
        largest_gap=max(gaps, default=0.0),
        tie_gap=config.tie_gap,
    )


@torch.inference_mode()
def _gap_at_divergence(
    target: Any, prompt: Prompt, drafted: NDArray[np.int64], plain: NDArray[np.int64]
) -> float:
    """Return the distance of the target's top two logits where two texts part."""
    shared = min(len(drafted), len(plain))
    differ = np.flatnonzero(drafted[:shared] != plain[:shared])
    first = int(differ[0]) if len(differ) else shared
    ids = np.concatenate([prompt.token_ids, plain[:first]]).astype(np.int64)
    device = target.lm_head.weight.device
    output = target.model(input_ids=torch.from_numpy(ids)[None].to(device), logits_to_keep=1)
    top = output.logits[0, -1].float().topk(2).values
    return float(top[0] - top[1])


def _now(target: Any) -> float:
    if target.lm_head.weight.is_cuda:
        torch.cuda.synchronize(target.lm_head.weight.device)
    return time.perf_counter()
