"""Settings of the torchrun program: one file tells every rank everything."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from dflash_core.config import FrozenModel
from dflash_core.draft.config import DraftConfig, LossConfig
from dflash_core.errors import ConfigError
from dflash_core.planning.config import BatchingConfig
from dflash_core.planning.cost import PlanCost
from dflash_core.target.config import TargetConfig

__all__ = [
    "CacheConfig",
    "OptimizerConfig",
    "TopologyConfig",
    "TrainingConfig",
    "TrainingJob",
    "ValidationConfig",
    "check_consumers",
    "check_job",
]


class TopologyConfig(FrozenModel):
    """Which ranks do what."""

    kind: Literal["colocated", "disaggregated"] = "colocated"
    """Every rank runs target and drafter, or each rank runs one of them."""
    num_ranks: int = Field(default=2, ge=1)
    """Processes in all."""
    num_target_ranks: int = Field(default=1, ge=1)
    """Processes that only run the target, when disaggregated."""
    queue_depth: int = Field(default=2, ge=1, le=64)
    """Micro-batches that may wait between two stages."""
    shard_target: bool = False
    """Spread each decoder layer of the target over the ranks that run it, for targets larger than
    one GPU; every layer's weights then travel between them in each forward."""
    shard_trained: bool = False
    """Spread weights, gradients and optimizer state of what is trained over the ranks that train
    it; every layer's weights then travel in each forward and backward, and its gradients once for
    each micro-batch."""

    @model_validator(mode="after")
    def _leave_drafters(self) -> "TopologyConfig":
        if self.kind == "disaggregated" and self.num_target_ranks >= self.num_ranks:
            raise ValueError(
                f"num_target_ranks {self.num_target_ranks} leaves no drafter among num_ranks "
                f"{self.num_ranks}; lower topology.num_target_ranks"
            )
        return self

    @property
    def num_consumers(self) -> int:
        """Ranks that consume micro-batches: the plan's world size."""
        return self.num_ranks - (self.num_target_ranks if self.kind == "disaggregated" else 0)


class OptimizerConfig(FrozenModel):
    """AdamW with warm-up and cosine decay, as published."""

    learning_rate: float = Field(default=6e-4, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of matrices."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's moments."""
    warmup_ratio: float = Field(default=0.04, ge=0, lt=1)
    """Share of all steps over which the learning rate rises."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Final learning rate as a share of the peak."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest global gradient norm."""


class CacheConfig(FrozenModel):
    """Where captured features are kept, when they are kept."""

    path: Path = Path("features")
    """Folder of feature caches; ranks of all machines must see the same one."""
    quota_gib: float = Field(default=100.0, gt=0)
    """Largest size of all caches in the folder; the longest unused ones make room."""


class ValidationConfig(FrozenModel):
    """Measurements on held-out samples while training."""

    every_steps: int | None = Field(default=None, ge=1)
    """Steps between teacher-forced losses on the held-out store; never when not given."""
    num_samples: int = Field(default=256, ge=1)
    """Held-out samples, spread over the lengths."""
    accept_every_steps: int | None = Field(default=None, ge=1)
    """Steps between real greedy decodings of held-out prompts; a multiple of every_steps."""
    num_prompts: int = Field(default=8, ge=1)
    """Prompts that are decoded."""
    max_new_tokens: int = Field(default=64, ge=2)
    """Tokens that are decoded for a prompt."""
    patience: int | None = Field(default=None, ge=1)
    """Measurements without a new best after which the run ends; all steps when not given."""
    false_alarm_rate: float = Field(default=0.01, gt=0, lt=0.5)
    """Chance per measurement that forgetting is reported where nothing changed."""

    @model_validator(mode="after")
    def _check_rhythm(self) -> "ValidationConfig":
        every, accept = self.every_steps, self.accept_every_steps
        if accept is not None and (every is None or accept % every):
            raise ValueError(
                f"accept_every_steps {accept} is no multiple of every_steps {every}; set "
                "validation.every_steps to a divisor of it"
            )
        if self.patience is not None and every is None:
            raise ValueError(
                f"patience {self.patience} needs measurements; set validation.every_steps"
            )
        return self


class TrainingConfig(FrozenModel):
    """One training run."""

    objective: Literal["draft", "target"] = "draft"
    """Train the drafter against the frozen target, or the target itself on supervised tokens."""
    epochs: int = Field(default=6, ge=1)
    """Passes over the data."""
    max_steps: int | None = Field(default=None, ge=1)
    """Stop after this many steps, with the learning rate scheduled over them."""
    seed: int = Field(default=0, ge=0)
    """Seed of plans, anchors and initial weights."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer settings."""
    topology: TopologyConfig = TopologyConfig()
    """Roles of ranks."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks run; auto takes a GPU where there is one."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of matrix products while training; weights and optimizer stay float32.

    On GPUs and on CPUs with AMX bfloat16 is several times faster; on other CPUs it is slower.
    """
    checkpoint_every_steps: int = Field(default=100, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept."""
    resume: bool = True
    """Continue from the newest complete checkpoint in the run folder."""
    preflight: bool = True
    """Run the largest micro-batches once before the first step, to see that memory suffices."""
    max_bad_steps: int = Field(default=5, ge=0)
    """Steps with a non-finite loss that are skipped before the run stops."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait for another rank, which may be loading a large model."""
    shutdown_save_s: float = Field(default=12.0, gt=0)
    """On a request to stop, a checkpoint that would take longer is not written."""
    features: Literal["online", "cache"] = "online"
    """Run the target for every micro-batch, or keep what it gave and run it once per sample."""
    cache: CacheConfig = CacheConfig()
    """Where features are kept."""
    validation: ValidationConfig = ValidationConfig()
    """Measurements on held-out samples."""
    threads_per_rank: int = Field(default=1, ge=1)
    """CPU threads of each rank."""


class TrainingJob(FrozenModel):
    """Everything the ranks need, resolved: the content of a run's ``job.json``."""

    run_dir: Path
    """Checkpoints, metrics and status go here."""
    store: Path
    """Token store to train on."""
    held_out_store: Path | None = None
    """Token store for validation."""
    target: TargetConfig
    """The target model; for objective 'target' its config and initial weights."""
    draft: DraftConfig = DraftConfig()
    """Shape of the drafter."""
    loss: LossConfig = LossConfig()
    """Loss of the drafter."""
    batching: BatchingConfig = BatchingConfig()
    """The plan's settings."""
    training: TrainingConfig = TrainingConfig()
    """The run's settings."""
    consumer_cost: PlanCost = PlanCost()
    """Measure that balances consuming ranks: who runs what, not what a step holds."""
    target_cost: PlanCost = PlanCost()
    """Measure that balances ranks which only run the target."""
    init_drafter: Path | None = None
    """Warm start: a drafter in z-lab layout."""


def check_consumers(batching: BatchingConfig, topology: TopologyConfig) -> None:
    """Refuse ranks that would idle in every step.

    Raises:
        ConfigError: A step has fewer micro-batches than ranks that consume them.
    """
    per_step, consumers = batching.micro_batches_per_step, topology.num_consumers
    if per_step < consumers:
        raise ConfigError(
            f"batching.micro_batches_per_step {per_step} leaves {consumers - per_step} of "
            f"{consumers} consuming ranks ({1 - per_step / consumers:.0%}) idle in every step; "
            f"raise it to {consumers} or more, or lower training.topology.num_ranks"
        )


def check_job(job: TrainingJob) -> None:
    """Look for settings that contradict each other.

    Raises:
        ConfigError: Two do.
    """
    training = job.training
    check_consumers(job.batching, training.topology)
    disaggregated = training.topology.kind == "disaggregated"
    if disaggregated and training.objective == "target":
        raise ConfigError(
            "training.objective 'target' has no frozen target to put on ranks of its own; set "
            "training.topology.kind to 'colocated'"
        )
    if disaggregated and training.features == "cache":
        raise ConfigError(
            "training.features 'cache' is filled and read by the rank that trains; set "
            "training.topology.kind to 'colocated'"
        )
    if training.objective == "target" and training.features == "cache":
        raise ConfigError(
            "training.features 'cache' keeps what a frozen target gives, but training.objective "
            "'target' changes it; set training.features to 'online'"
        )
    sharded = training.topology.shard_target
    if sharded and (training.features == "cache" or training.objective == "target"):
        raise ConfigError(
            "training.topology.shard_target spreads a target that runs equally often on all its "
            f"ranks, which features '{training.features}' with objective '{training.objective}' "
            "does not; leave it out (training.topology.shard_trained spreads what is trained), or "
            "set training.features to 'online' and training.objective to 'draft'"
        )
    if sharded and job.draft.initial_weights == "target":
        raise ConfigError(
            "draft.initial_weights 'target' copies whole layers, which training.topology."
            "shard_target spreads over ranks; set draft.initial_weights to 'random'"
        )
    if training.validation.every_steps is not None and job.held_out_store is None:
        raise ConfigError(
            f"training.validation.every_steps is {training.validation.every_steps} but there are "
            "no held-out samples; give --held-out, or set held_out_store in the job"
        )
    accept = training.validation.accept_every_steps
    if accept is not None and (disaggregated or sharded or training.objective == "target"):
        raise ConfigError(
            f"training.validation.accept_every_steps is {accept}, but decoding needs drafter and "
            "whole target on one rank; set training.topology.kind to 'colocated' without "
            "shard_target and training.objective to 'draft', or leave it out"
        )
