"""What a run tells while it runs: one JSON line per step, and where it stands.

``metrics.jsonl`` fields of every objective: ``step`` (from 1), ``num_steps``, ``epoch`` (from 0),
``epoch_progress`` in (0, 1], ``loss``, ``accuracy``, ``grad_norm`` (before clipping),
``learning_rate``, ``skipped`` (the loss was not finite), ``real_tokens``, ``token_slots``,
``supervised_tokens``, ``padding_efficiency``, ``step_s``, ``real_tokens_per_s``, ``slots_per_s``,
``wait_s`` (mean over ranks of time spent waiting for the slowest), ``bottleneck``,
``peak_memory_bytes`` (summed over ranks). The drafter adds ``loss_by_position`` and
``accuracy_by_position`` (slots 1 .. block_size - 1), ``expected_acceptance``, ``num_anchors``,
``covered_tokens``, ``samples_without_anchors``, ``target_s`` and ``draft_s`` (summed over ranks).
"""

import json
import os
import resource
from pathlib import Path
from typing import Any

import torch

from dflash_core.artifacts import atomic_write

__all__ = ["MetricsFile", "peak_memory_bytes", "write_status"]

METRICS_NAME = "metrics.jsonl"
STATUS_NAME = "status.json"


class MetricsFile:
    """Appends one line per step.

    Args:
        run_dir: The run's folder.
        keep_steps: Steps that a resumed run has done; later lines are dropped, they will come
            again.
    """

    def __init__(self, run_dir: Path, *, keep_steps: int) -> None:
        file = run_dir / METRICS_NAME
        kept = []
        if file.is_file() and keep_steps:
            lines = file.read_text().splitlines()
            kept = [line for line in lines if _step_of(line) <= keep_steps]
        atomic_write(file, "".join(f"{line}\n" for line in kept))
        self._stream = file.open("a", buffering=1)

    def write(self, metrics: dict[str, Any]) -> None:
        """Append one step."""
        self._stream.write(json.dumps(metrics) + "\n")

    def close(self) -> None:
        """Flush to disk and close."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()


def write_status(
    run_dir: Path, state: str, *, step: int = 0, num_steps: int = 0, reason: str = ""
) -> None:
    """Write ``status.json``: running, finished, interrupted or failed, and why."""
    status = {"state": state, "step": step, "num_steps": num_steps, "reason": reason}
    atomic_write(run_dir / STATUS_NAME, json.dumps(status) + "\n")


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process on its device; resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _step_of(line: str) -> int:
    """Return a line's step; a line that a crash cut short counts as not written."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError):
        return 1 << 62
