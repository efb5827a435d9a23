"""What was measured of a drafter, as values: acceptance, exactness, speed.

Acceptance length is tokens committed per verification, the bonus token included. Two averages are
in use and differ: pooled over all verifications (what sets the speed of a server), and the mean
over texts of each text's own mean (what the paper's harness prints). Both are reported. So are two
speed-ups: of whole requests (what a user waits for), and of decoding alone, without the prompts'
forwards (what the paper's harness prints).
"""

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from dflash_core.config import FrozenModel
from dflash_core.corpus.masking.encoding import EncoderFacts

__all__ = [
    "AcceptanceGroup",
    "AcceptanceReport",
    "BatchTime",
    "Exactness",
    "Speed",
    "speed_facts",
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
    """Greedy texts with the drafter against the target's own, over all batch sizes."""

    num_identical: int
    """Texts that are the same."""
    num_ties: int
    """Texts that differ from a place on where the target's top two logits are too close."""
    num_faults: int
    """Texts that differ otherwise."""
    identical_share: float
    """Share of texts that are the same."""
    largest_gap: float
    """Largest distance of the target's top two logits at a first divergence, relative to the
    largest logit there."""
    tie_gap: float
    """Distance below which a divergence counts as a tie."""

    @property
    def words(self) -> str:
        """The counts in words."""
        return (
            f"{self.num_identical} of {self.num_identical + self.num_ties + self.num_faults} texts "
            f"identical to the target alone, {self.num_ties} ties, {self.num_faults} faults "
            f"(largest gap {self.largest_gap:.1e})"
        )


class BatchTime(FrozenModel):
    """What one batch took."""

    num_tokens: int
    """New tokens of all its prompts."""
    prompt_s: float
    """Time until the first token of each, which comes from the prompts' forward."""
    decode_s: float
    """Time for all others."""

    @property
    def seconds(self) -> float:
        """Time in all."""
        return self.prompt_s + self.decode_s


class Speed(FrozenModel):
    """Wall-clock speed at one batch size, on the same full batches with and without a drafter."""

    batch_size: int
    """Prompts decoded together."""
    speculative_tokens_per_s: float
    """New tokens per second with the drafter, prompts' forwards included."""
    plain_tokens_per_s: float | None = None
    """New tokens per second of the target alone in the same run."""
    speedup: float | None = None
    """Ratio of the two."""
    decode_speedup: float | None = None
    """Their ratio without the prompts' forwards and the tokens that come from those."""
    speculative_batches: tuple[BatchTime, ...] = ()
    """Each batch with the drafter."""
    plain_batches: tuple[BatchTime, ...] = ()
    """The same batches without."""

    @property
    def is_slower(self) -> bool:
        """Whether plain decoding was faster."""
        return self.speedup is not None and self.speedup < 1

    @property
    def words(self) -> str:
        """The speed-up in words; empty where plain decoding was not timed."""
        if self.speedup is None:
            return ""
        slower = ", slower than plain decoding" if self.is_slower else ""
        alone = "" if self.decode_speedup is None else f", {self.decode_speedup:.2f}x after prompts"
        return f"{self.speedup:.2f}x plain decoding at batch size {self.batch_size}{alone}{slower}"


def speed_facts(
    batch_size: int, speculative: Sequence[BatchTime], plain: Sequence[BatchTime]
) -> dict[str, Any]:
    """Return the fields of a `Speed`.

    Args:
        batch_size: Prompts of each batch.
        speculative: Each batch with the drafter.
        plain: The same batches without, or none.
    """
    drafted, alone = (_rate(batches) for batches in (speculative, plain))
    decoding, decoding_alone = (
        _decoding_rate(batches, batch_size) for batches in (speculative, plain)
    )
    return {
        "batch_size": batch_size,
        "speculative_tokens_per_s": drafted,
        "plain_tokens_per_s": alone or None,
        "speedup": drafted / alone if alone else None,
        "decode_speedup": decoding / decoding_alone if decoding_alone else None,
        "speculative_batches": tuple(speculative),
        "plain_batches": tuple(plain),
    }


def _rate(batches: Sequence[BatchTime]) -> float:
    seconds = sum(batch.seconds for batch in batches)
    return sum(batch.num_tokens for batch in batches) / seconds if seconds else 0.0


def _decoding_rate(batches: Sequence[BatchTime], batch_size: int) -> float:
    seconds = sum(batch.decode_s for batch in batches)
    return sum(batch.num_tokens - batch_size for batch in batches) / seconds if seconds else 0.0


class AcceptanceReport(Speed):
    """What a drafter is worth on some prompts; its own speed is that of the first batch size."""

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
    temperature: float
    """0 is greedy."""
    dtype: str
    """Precision of the target."""
    num_left_out: int = 0
    """Prompts that do not fit into the target's positions with as many new tokens, or are asked
    behind an answer that cannot be encoded."""
    served_as: str = "zlab"
    """Layout whose servers were stood in for."""
    exactness: Exactness | None = None
    """Greedy only, when compared with plain decoding."""
    encoder: EncoderFacts | None = None
    """Template, variables and thinking mode of the prompts, where known."""
    more_speeds: tuple[Speed, ...] = ()
    """Speed at each further batch size."""

    @property
    def tau(self) -> float:
        """Acceptance length pooled over all verifications."""
        return self.overall.tau

    @property
    def speeds(self) -> tuple[Speed, ...]:
        """Speed at each batch size, the report's own first."""
        return (self, *self.more_speeds)

    @property
    def has_faults(self) -> bool:
        """Whether greedy texts in float32 differ from the target's own, ties set aside."""
        exact = self.exactness
        return self.dtype == "float32" and exact is not None and exact.num_faults > 0

    @property
    def words(self) -> str:
        """Acceptance and the speed at its batch size in words."""
        speed = f", {super().words}" if self.speedup is not None else ""
        return (
            f"tau {self.tau:.2f} pooled, {self.overall.tau_mean:.2f} mean of means, over "
            f"{self.overall.num_prompts} prompts{speed}"
        )

    @property
    def metrics(self) -> dict[str, float]:
        """What is drawn over runs, by name."""
        found = {"tau": self.tau, "tau_mean": self.overall.tau_mean}
        for speed in self.speeds:
            at = "" if speed is self else f"_at_{speed.batch_size}"
            for name in ("speedup", "decode_speedup"):
                if (value := getattr(speed, name)) is not None:
                    found[f"{name}{at}"] = value
        return found
