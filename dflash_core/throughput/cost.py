"""What a micro-batch costs: measured terms for each role.

What drives the time differs by role. The target computes every token slot, padding included, and
attends along padded rows. The drafter reads real tokens only, up to each document's last anchor,
and computes its blocks; each block attends to the context before its anchor.
"""

from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from dflash_core.artifacts import content_digest
from dflash_core.config import FrozenModel, changed
from dflash_core.errors import CalibrationError
from dflash_core.planning import PlanCost

__all__ = [
    "ROLE_TERMS",
    "TERMS",
    "Coefficients",
    "CostModel",
    "Fingerprint",
    "Measurement",
    "Role",
    "RoleFit",
]

Role = Literal["prefetch", "target", "read", "draft"]

TERMS: dict[str, str] = {
    "constant_s": "micro-batch",
    "document_s": "document",
    "slot_s": "token slot",
    "slot_length_s": "token slot x row length",
    "token_s": "real token",
    "anchor_token_s": "anchor token",
    "anchor_context_s": "anchor token x context token",
}
"""Field of `Coefficients` and what it multiplies, in words."""

ROLE_TERMS: dict[Role, tuple[str, ...]] = {
    "prefetch": ("constant_s", "document_s", "slot_s"),
    "target": ("constant_s", "slot_s", "slot_length_s"),
    "read": ("constant_s", "document_s", "token_s"),
    "draft": ("constant_s", "document_s", "token_s", "anchor_token_s", "anchor_context_s"),
}
"""Terms that each role's time is made of."""

COST_RESOLUTION = 2**18  # of the largest term; small enough for 64-bit sums over an epoch


class Measurement(FrozenModel):
    """One timed micro-batch of rows that hold one document each."""

    role: Role
    """What ran: reading and laying out, the target's forward, reading features from disk instead,
    or the drafter's both ways."""
    rows: int = Field(ge=1)
    """Rows of the micro-batch."""
    padded_length: int = Field(ge=1)
    """Token slots of a row."""
    real_tokens: int = Field(ge=1)
    """Tokens of its documents."""
    anchor_tokens: int = Field(default=0, ge=0)
    """Anchors times block size."""
    anchor_contexts: int = Field(default=0, ge=0)
    """Sum over the documents of anchor tokens times document length."""
    seconds: float = Field(gt=0)
    """Time with all ranks busy, mean over the ranks."""
    cell: int = 0
    """Number of the grid cell; shapes of one cell are left out together to test the fit."""


class Coefficients(FrozenModel):
    """Seconds of a micro-batch as a sum of non-negative terms; 0 where a role has none."""

    constant_s: float = Field(default=0.0, ge=0)
    """Per micro-batch."""
    document_s: float = Field(default=0.0, ge=0)
    """Per document."""
    slot_s: float = Field(default=0.0, ge=0)
    """Per token slot, padding included."""
    slot_length_s: float = Field(default=0.0, ge=0)
    """Per token slot and token that it attends to."""
    token_s: float = Field(default=0.0, ge=0)
    """Per real token."""
    anchor_token_s: float = Field(default=0.0, ge=0)
    """Per anchor and block position."""
    anchor_context_s: float = Field(default=0.0, ge=0)
    """Per anchor, block position and token of the anchor's document."""

    def seconds(self, amounts: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
        """Return predicted seconds.

        Args:
            amounts: What each term multiplies, by field name, arrays of one shape.
        """
        shape = np.shape(next(iter(amounts.values())))
        total = np.zeros(shape)
        for name in TERMS:
            value = getattr(self, name)
            if value:
                total += value * amounts[name]
        return total


class RoleFit(FrozenModel):
    """A role's coefficients and how sure they are."""

    coefficients: Coefficients = Coefficients()
    """Fitted to all measurements."""
    alternatives: tuple[Coefficients, ...] = ()
    """Fitted without one grid cell each: how far a plan's time could be off."""
    held_out_error: float = Field(default=0.0, ge=0)
    """Median error over cells, each predicted from the others, as a share of the time."""
    inseparable: tuple[str, ...] = ()
    """Pairs of terms that the measured shapes could not tell apart, in words."""


class Fingerprint(FrozenModel):
    """What a calibration was measured on; it says nothing about anything else."""

    hardware: str
    """Processor or GPU, with the count that was busy."""
    num_ranks: int
    """Processes that ran at the same time."""
    threads_per_rank: int
    """CPU threads of each."""
    target: str
    """Hash of the target's config and weights."""
    draft: str
    """Hash of the drafter's shape and loss."""
    block_size: int
    """Block size of the drafter."""
    precision: str
    """Precision of target and training."""
    attention: str
    """Attention implementation of the target."""
    shard_target: bool = False
    """Whether the target's layers were spread over the ranks."""
    shard_trained: bool = False
    """Whether the drafter was spread over the ranks."""
    features: str = "online"
    """Where the run's features come from: the target, or a cache after its first forward."""
    versions: str
    """Versions of the libraries that do the work."""

    @property
    def digest(self) -> str:
        """Name of calibrations of this machine and model."""
        return content_digest(self.model_dump())[:16]

    def differences(self, other: "Fingerprint") -> list[str]:
        """Return one phrase per field that differs."""
        return [
            f"{name} {_short(getattr(self, name))} is not {_short(getattr(other, name))}"
            for name in type(self).model_fields
            if getattr(self, name) != getattr(other, name)
        ]


class CostModel(FrozenModel):
    """A calibrated machine."""

    prefetch: RoleFit = RoleFit()
    """Reading samples and laying them out."""
    target: RoleFit
    """Forward of the frozen target; with a feature cache, keeping its features too."""
    read: RoleFit | None = None
    """Reading kept features, where the run keeps them."""
    draft: RoleFit
    """Forward and backward of the drafter."""
    step_s: float = Field(default=0.0, ge=0)
    """Per optimizer step: clipping and update."""
    reduce_s: float = Field(default=0.0, ge=0)
    """Per optimizer step: summing gradients over all ranks that were calibrated."""
    jitter: float = Field(default=0.0, ge=0)
    """Standard deviation of one rank's micro-batch time against the other ranks', as a share."""
    transfer_latency_s: float = Field(default=0.0, ge=0)
    """Sending a micro-batch's features to another rank: constant part."""
    transfer_s_per_token: float = Field(default=0.0, ge=0)
    """Sending the features of one real token to another rank."""
    correction: float = Field(default=1.0, gt=0)
    """Measured over modelled time of a rehearsal: real steps of a plan, all stages together."""
    correction_error: float = Field(default=0.0, ge=0)
    """Standard error of the correction, as a share of it."""
    overlaps: bool = True
    """Whether reading ahead costs the computing ranks nothing: cores to spare, or a GPU."""
    drift: float = Field(default=0.05, ge=0)
    """Share by which runs on this machine differed from their predictions before."""
    fingerprint: Fingerprint | None = None
    """Where it was measured."""

    @property
    def relative_error(self) -> float:
        """Largest held-out error of what takes a run's time: all roles but reading ahead."""
        return max(fit.held_out_error for role, fit in self.roles.items() if role != "prefetch")

    @property
    def inseparable(self) -> tuple[str, ...]:
        """Terms that could not be told apart, in words."""
        return tuple(words for role in self.roles.values() for words in role.inseparable)

    @property
    def roles(self) -> dict[Role, RoleFit]:
        """Each role that was calibrated."""
        roles: dict[Role, RoleFit] = {"prefetch": self.prefetch, "target": self.target}
        if self.read is not None:
            roles["read"] = self.read
        roles["draft"] = self.draft
        return roles

    @property
    def attends_documents_only(self) -> bool:
        """Whether the target skips what a packed row's mask hides; SDPA computes it all."""
        kind = "" if self.fingerprint is None else self.fingerprint.attention
        return kind in {"flash_attention_2", "flex_attention"}

    def step_seconds(self, num_consumers: int) -> float:
        """Return what every step costs once when so many ranks train the drafter.

        A rank sends and receives ``2 (n - 1) / n`` of all gradients to sum them over ``n`` ranks.
        """
        measured = 1 if self.fingerprint is None else self.fingerprint.num_ranks
        if measured == 1 or num_consumers == 1:
            return self.step_s
        share = (1 - 1 / num_consumers) / (1 - 1 / measured)
        return self.step_s + share * self.reduce_s

    def reading(self) -> "CostModel":
        """Return the costs of an epoch that reads kept features in place of running the target.

        Raises:
            CalibrationError: Reading was not measured.
        """
        if self.read is None:
            raise CalibrationError(
                "the calibration does not say what reading kept features takes; run dflash-flow "
                "calibrate with training.features 'cache'"
            )
        return changed(self, {"target": self.read})

    def require(self, wanted: Fingerprint) -> None:
        """Refuse to stand for another machine or model.

        Raises:
            CalibrationError: It was measured elsewhere, or nobody knows where.
        """
        if self.fingerprint is None:
            raise CalibrationError(
                "the calibration does not say what it was measured on; run dflash-flow calibrate"
            )
        if found := self.fingerprint.differences(wanted):
            raise CalibrationError(
                f"the calibration was measured under other conditions: {'; '.join(found)}; run "
                "dflash-flow calibrate for this run"
            )

    def plan_cost(
        self, kind: Literal["colocated", "disaggregated"], *, block_size: int, lengths: ArrayLike
    ) -> PlanCost:
        """Return the measure that balances the ranks which consume micro-batches.

        Args:
            kind: Consumers run target and drafter, or the drafter only.
            block_size: Block size of the drafter.
            lengths: Sequence lengths in tokens; blocks' attention is counted at their mean.
        """
        draft = self.draft.coefficients
        mean_length = float(np.asarray(lengths, dtype=np.float64).mean())
        target = self.target.coefficients if kind == "colocated" else Coefficients()
        return _whole_numbers(
            constant_s=target.constant_s + draft.constant_s,
            slot_s=target.slot_s + draft.token_s,
            slot_length_s=target.slot_length_s,
            anchor_s=block_size * (draft.anchor_token_s + draft.anchor_context_s * mean_length),
        )

    def target_cost(self) -> PlanCost:
        """Return the measure that balances ranks which only run the target."""
        target = self.target.coefficients
        return _whole_numbers(
            constant_s=target.constant_s, slot_s=target.slot_s, slot_length_s=target.slot_length_s
        )


def _whole_numbers(
    *, constant_s: float, slot_s: float, slot_length_s: float, anchor_s: float = 0.0
) -> PlanCost:
    """Return seconds in a unit so small that rounding does not show."""
    unit = max(max(slot_s, anchor_s, slot_length_s * 2**8) / COST_RESOLUTION, constant_s / 2**40)
    if unit <= 0:
        return PlanCost()
    return PlanCost(
        per_micro_batch=round(constant_s / unit),
        per_slot=round(slot_s / unit),
        per_slot_length=round(slot_length_s / unit),
        per_anchor=round(anchor_s / unit),
    )


def _short(value: object) -> str:
    text = str(value)
    return repr(text if len(text) < 64 else text[:12])
