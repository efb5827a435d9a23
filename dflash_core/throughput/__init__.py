"""What will it cost? Cost model, simulation of the pipeline, and the gate."""

from dflash_core.throughput.cost import Coefficients, CostModel, Fingerprint, Measurement
from dflash_core.throughput.fitting import Fit, fit_coefficients
from dflash_core.throughput.gate import Candidate, GateConfig, GateResult, GateVerdict, judge
from dflash_core.throughput.prediction import Prediction, predict

__all__ = [
    "Candidate",
    "Coefficients",
    "CostModel",
    "Fingerprint",
    "Fit",
    "GateConfig",
    "GateResult",
    "GateVerdict",
    "Measurement",
    "Prediction",
    "fit_coefficients",
    "judge",
    "predict",
]
