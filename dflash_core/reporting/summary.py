"""What a run found out, as one value: the page, the artifacts and the command line read it."""

from pydantic import Field

from dflash_core.config import FrozenModel
from dflash_core.decoding.report import AcceptanceReport
from dflash_core.throughput.accuracy import Accuracy
from dflash_core.throughput.gate import GateResult
from dflash_core.throughput.prediction import Prediction

__all__ = ["CorpusFacts", "ProfileFacts", "RunSummary", "StrategyFacts", "TrainingFacts"]


class CorpusFacts(FrozenModel):
    """Where the samples came from."""

    source: str
    """The standard library, or files."""
    num_train: int
    """Samples to train on."""
    num_held_out: int
    """Samples held out."""
    num_regenerated: int = 0
    """Answers that the target wrote anew."""
    num_kept: int = 0
    """Answers that keep their source text."""
    num_cut_off: int = 0
    """Regenerated answers cut off at the longest length allowed."""
    num_truncated: int = 0
    """Samples cut at the longest length."""
    num_rejected: int = 0
    """Rows that could not be taken."""
    num_duplicates: int = 0
    """Samples that had occurred before."""
    num_leaks: int = 0
    """Training samples left out because they stand in the held-out store."""
    encoder: str = ""
    """Digest of template, variables and tokenizer."""
    thinking: str = ""
    """What the template is told of thoughts, and how it lets an answer begin."""


class ProfileFacts(FrozenModel):
    """Sequence lengths of the training samples."""

    num_samples: int
    """Samples."""
    total_tokens: int
    """Tokens."""
    total_supervised: int
    """Supervised tokens."""
    quantiles: dict[str, float]
    """Lengths by name of quantile."""
    spike: str = ""
    """A pile of samples at one length, in words; empty when there is none."""
    lengths: tuple[int, ...]
    """Distinct lengths, increasing."""
    counts: tuple[int, ...]
    """Samples of each length."""
    edges: tuple[int, ...] = ()
    """Fitted bucket edges."""


class StrategyFacts(FrozenModel):
    """One strategy of the comparison."""

    name: str
    """Strategy."""
    mixing: str
    """Mixing."""
    padding_efficiency: float
    """Real tokens / token slots."""
    num_micro_batches: int
    """Micro-batches of an epoch."""
    num_steps: int
    """Steps of an epoch."""
    length_eta2: float
    """Share of length variance between micro-batches."""
    step_length_eta2: float
    """Share of length variance between steps."""
    pair_recurrence: float
    """Share of pairs that meet again in the next epoch."""
    straggler_factor: float
    """Slowest over mean rank cost."""
    plan_hash: str = ""
    """Content hash of the plan of epoch 0."""
    prediction: Prediction
    """Its predicted throughput."""


class TrainingFacts(FrozenModel):
    """What training did."""

    strategy: str
    """Strategy and mixing that were trained."""
    num_steps: int
    """Optimizer steps."""
    epochs: int
    """Passes over the data."""
    seconds: float
    """Sum of all steps' seconds."""
    measured_ktok_s: float
    """Real tokens per second in steady state, in thousands."""
    predicted_ktok_s: float
    """What the calibration had predicted."""
    final_loss: float
    """Mean loss of the last twentieth of the steps."""
    acceptance_at_anchors: float
    """Mean leading correct drafts from drawn anchors on, and the bonus token, over these steps."""
    peak_memory_bytes: int
    """Over all ranks."""
    accuracy: Accuracy | None = None
    """Each epoch and stage held against the prediction."""
    memory: str = ""
    """What the pre-flight found, in words."""
    losses: tuple[float, ...]
    """Loss of each step."""
    acceptances: tuple[float, ...]
    """Acceptance at the anchors of each step."""

    @property
    def prediction_error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted_ktok_s / self.measured_ktok_s - 1


class RunSummary(FrozenModel):
    """A whole run."""

    name: str
    """The run's name."""
    started: str
    """When, UTC."""
    target: str
    """The target, in words."""
    hardware: str
    """Where it ran."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Commit and versions."""
    corpus: CorpusFacts
    """The corpus."""
    profile: ProfileFacts
    """Its lengths."""
    strategies: tuple[StrategyFacts, ...]
    """The strategies compared."""
    gate: GateResult
    """The gate's verdicts, in the strategies' order."""
    training: TrainingFacts | None = None
    """Training, unless everything was rejected."""
    acceptance: AcceptanceReport | None = None
    """Real acceptance."""
    model_version: str = ""
    """Name and version in the registry."""
