"""What will it cost? Cost model, simulation of the pipeline, and the gate."""

from dflash_core.throughput.accuracy import (
    Accuracy,
    Drift,
    EpochAccuracy,
    hold_against,
    learn_drift,
    measured_ktok_s,
)
from dflash_core.throughput.advice import Option, advise, splits_of
from dflash_core.throughput.cost import (
    Coefficients,
    CostModel,
    Fingerprint,
    Measurement,
    RoleFit,
)
from dflash_core.throughput.fitting import fit_role
from dflash_core.throughput.gate import (
    Candidate,
    GateConfig,
    GateResult,
    GateVerdict,
    judge,
    keep_begun,
)
from dflash_core.throughput.observed import (
    Observation,
    ObservedForm,
    PlanTotals,
    Projection,
    fit_forms,
)
from dflash_core.throughput.prediction import Prediction, predict
from dflash_core.throughput.simulation import Durations, Timeline, route_targets, simulate
from dflash_core.throughput.topology import Split, Topology
from dflash_core.throughput.workload import Workload
from dflash_core.throughput.worst import fitting_budget, worst_micro_batches

__all__ = [
    "Accuracy",
    "Candidate",
    "Coefficients",
    "CostModel",
    "Drift",
    "Durations",
    "EpochAccuracy",
    "Fingerprint",
    "GateConfig",
    "GateResult",
    "GateVerdict",
    "Measurement",
    "Observation",
    "ObservedForm",
    "Option",
    "PlanTotals",
    "Prediction",
    "Projection",
    "RoleFit",
    "Split",
    "Timeline",
    "Topology",
    "Workload",
    "advise",
    "fit_forms",
    "fit_role",
    "fitting_budget",
    "hold_against",
    "judge",
    "keep_begun",
    "learn_drift",
    "measured_ktok_s",
    "predict",
    "route_targets",
    "simulate",
    "splits_of",
    "worst_micro_batches",
]
