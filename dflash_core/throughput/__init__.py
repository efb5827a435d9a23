"""What will it cost? Cost model, simulation of the pipeline, and the gate."""

from dflash_core.throughput.cost import (
    Coefficients,
    CostModel,
    Fingerprint,
    Measurement,
    RoleFit,
)
from dflash_core.throughput.fitting import fit_role
from dflash_core.throughput.gate import Candidate, GateConfig, GateResult, GateVerdict, judge
from dflash_core.throughput.prediction import Prediction, predict
from dflash_core.throughput.simulation import Durations, Timeline, route_targets, simulate
from dflash_core.throughput.topology import Split, Topology
from dflash_core.throughput.workload import Workload

__all__ = [
    "Candidate",
    "Coefficients",
    "CostModel",
    "Durations",
    "Fingerprint",
    "GateConfig",
    "GateResult",
    "GateVerdict",
    "Measurement",
    "Prediction",
    "RoleFit",
    "Split",
    "Timeline",
    "Topology",
    "Workload",
    "fit_role",
    "judge",
    "predict",
    "route_targets",
    "simulate",
]
