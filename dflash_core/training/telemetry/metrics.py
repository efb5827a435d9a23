"""What a run tells while it runs: one JSON line per step, and where it stands.

``metrics.jsonl`` has one object a step. Times are of the step on rank 0 unless said otherwise; a
number that is not finite is null.

Place: ``step`` (from 1), ``num_steps``, ``epoch`` (from 0), ``epoch_progress`` in (0, 1].

Loss: ``loss``, ``accuracy``, ``loss_adjusted``, ``loss_expected`` and ``loss_explained_share`` (see
`dflash_core.training.telemetry.composition`), ``loss_by_length`` (by the length groups that end at
``length_edges``), ``grad_norm`` (before clipping), ``learning_rate``, ``skipped`` (loss or gradient
was not finite, nothing was learnt), ``skipped_steps`` (so far). The drafter adds
``loss_by_position`` and ``accuracy_by_position`` (slots 1 .. block_size - 1),
``acceptance_at_anchors`` (mean leading correct drafts from the drawn anchors on, and the bonus
token; not what decoding reaches), ``num_anchors``, ``covered_tokens`` (supervised tokens in at
least one scored slot), ``samples_without_anchors``.

Tokens: ``real_tokens``, ``token_slots``, ``supervised_tokens``, ``padding_efficiency``,
``padding_efficiency_so_far`` (since the run began), ``real_tokens_per_s``, ``slots_per_s``,
``supervised_tokens_per_s``.

Time: ``step_s``; ``target_s``, ``draft_s``, ``prefetch_s`` (summed over the ranks that do it);
``feature_wait_s`` (mean over drafter ranks of waiting for the next micro-batch), ``wait_s`` (mean
over drafter ranks of waiting for the slowest of them and summing gradients), ``busy_shares`` (of
the time of drafter ranks for ``prefetch`` and ``draft``, which includes clipping and update; of
ranks that run the target for ``target``),
``queue_depths`` (mean number of micro-batches found waiting: ``prefetch`` on drafter ranks,
``features`` on target ranks), ``bottleneck`` (prefetch, target, draft or wait: the largest share),
``peak_memory_bytes`` (summed over drafter ranks).

After a measurement: ``held_out_loss``, ``held_out_accuracy``, ``held_out_expected_acceptance`` (the
acceptance length that greedy decoding of these very texts would have), ``held_out_loss_by_group``,
``forgotten_groups`` (see `dflash_core.training.telemetry.forgetting`), and ``held_out_acceptance``
when prompts were decoded.
"""

import fcntl
import json
import math
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_core.artifacts import atomic_write
from dflash_core.training.batches.length_groups import NUM_GROUPS, group_of, length_edges
from dflash_core.training.batches.schedule import Epochs
from dflash_core.training.batches.types import MicroBatch
from dflash_core.training.features.pipeline import Pipeline
from dflash_core.training.features.transfer import Ready
from dflash_core.training.objectives.base import Objective, Outcome
from dflash_core.training.ranks.groups import Ranks
from dflash_core.training.telemetry.composition import CompositionMonitor
from dflash_core.training.telemetry.status import METRICS_NAME, STATUS_NAME, read_status

__all__ = [
    "MetricsFile",
    "StepMonitor",
    "StepSums",
    "peak_memory_bytes",
    "write_status",
]

TIMES = (
    "target_s",
    "draft_s",
    "prefetch_s",
    "feature_wait_s",
    "work_s",
    "num_waiting",
    "num_ahead",
    "num_taken",
    "peak_memory_bytes",
    "asked_to_stop",
)


@dataclass(frozen=True)
class StepSums:
    """Everything of a step that adds over micro-batches and ranks, in one float64 vector.

    Attributes:
        flat: The vector.
        num_sums: Numbers of the objective, which come first.
        num_positions: Positions that the loss is kept apart by.
    """

    flat: Tensor
    num_sums: int
    num_positions: int

    @classmethod
    def zeros(cls, objective: Objective) -> "StepSums":
        """Return sums of nothing."""
        size = objective.num_sums + 2 * NUM_GROUPS * objective.num_positions + len(TIMES)
        flat = torch.zeros(size, dtype=torch.float64)
        return cls(flat, objective.num_sums, objective.num_positions)

    def add(self, outcome: Outcome, ready: Ready, seconds: float) -> None:
        """Take in one micro-batch."""
        self.objective.add_(outcome.sums)
        self.by_group[0].add_(outcome.loss_GK)
        self.by_group[1].add_(outcome.weight_GK)
        self.put("target_s", ready.target_s)
        self.put("draft_s", seconds)
        self.put("num_ahead", ready.num_ahead)
        self.put("num_taken", 1)

    def put(self, name: str, value: float) -> None:
        """Add to one of the `TIMES`."""
        self.flat[TIMES.index(name) - len(TIMES)] += value

    def get(self, name: str) -> float:
        """Return one of the `TIMES`."""
        return float(self.flat[TIMES.index(name) - len(TIMES)])

    @property
    def objective(self) -> Tensor:
        """The objective's own sums."""
        return self.flat[: self.num_sums]

    @property
    def by_group(self) -> Tensor:
        """Loss and weight sums by length group and position, shape ``(2, groups, positions)``."""
        return self.flat[self.num_sums : -len(TIMES)].view(2, NUM_GROUPS, self.num_positions)

    @property
    def asked_to_stop(self) -> bool:
        """Whether any rank was asked to stop."""
        return self.get("asked_to_stop") > 0


class StepMonitor:
    """Times a step on this rank and says what it was.

    Args:
        epochs: The plans.
        objective: What is trained.
        ranks: This process among the others.
    """

    def __init__(self, epochs: Epochs, objective: Objective, ranks: Ranks) -> None:
        self._epochs = epochs
        self._objective = objective
        self._ranks = ranks
        self._edges = length_edges(epochs.lengths)
        self._groups = torch.from_numpy(group_of(epochs.lengths, self._edges))
        self._composition = CompositionMonitor()
        self._tokens = [0, 0]  # real tokens and slots so far
        self._begin = self._reduced = 0.0
        self._marks = (0.0, 0.0)

    def groups(self, micro_batch: MicroBatch) -> Tensor:
        """Return the length group of each sample of a training micro-batch."""
        return self._groups[micro_batch.samples]

    def begin(self, pipeline: Pipeline) -> None:
        """Start the clock of a step."""
        self._begin = time.perf_counter()
        self._marks = (pipeline.prefetch_s, pipeline.waited_s)

    def end_of_work(self, pipeline: Pipeline, sums: StepSums, *, asked_to_stop: bool) -> None:
        """Note what this rank did before it met the others."""
        prefetch_s, waited_s = self._marks
        sums.put("prefetch_s", pipeline.prefetch_s - prefetch_s)
        sums.put("feature_wait_s", pipeline.waited_s - waited_s)
        sums.put("work_s", time.perf_counter() - self._begin)
        sums.put("num_waiting", pipeline.num_waiting)
        sums.put("peak_memory_bytes", peak_memory_bytes(self._ranks.device))
        sums.put("asked_to_stop", float(asked_to_stop))

    def reduced(self) -> None:
        """Note that the others were met."""
        self._reduced = time.perf_counter()

    def describe(self, step: int, sums: StepSums) -> dict[str, Any]:
        """Return the line of a step from its sums over all ranks."""
        epoch, place = self._epochs.locate(step)
        loss_GK, weight_GK = sums.by_group
        judged = self._composition.observe(loss_GK.numpy(), weight_GK.numpy())
        by_length = loss_GK.sum(1) / weight_GK.sum(1)
        return {
            "step": step + 1,
            "num_steps": self._epochs.num_steps,
            "epoch": epoch,
            "epoch_progress": (place + 1) / self._epochs.steps_per_epoch[epoch],
            **self._objective.describe(sums.objective),
            "loss_adjusted": judged.adjusted,
            "loss_expected": judged.expected,
            "loss_explained_share": judged.explained_share,
            "loss_by_length": by_length[: len(self._edges)].tolist(),
            "length_edges": self._edges.tolist(),
            **self._rates(step, time.perf_counter() - self._begin),
            **self._times(sums, time.perf_counter() - self._begin),
        }

    def _rates(self, step: int, step_s: float) -> dict[str, Any]:
        counts = self._epochs.counts(step)
        self._tokens[0] += counts.real_tokens
        self._tokens[1] += counts.token_slots
        return {
            "real_tokens": counts.real_tokens,
            "token_slots": counts.token_slots,
            "supervised_tokens": counts.supervised_tokens,
            "padding_efficiency": counts.real_tokens / counts.token_slots,
            "padding_efficiency_so_far": self._tokens[0] / self._tokens[1],
            "step_s": step_s,
            "real_tokens_per_s": counts.real_tokens / step_s,
            "slots_per_s": counts.token_slots / step_s,
            "supervised_tokens_per_s": counts.supervised_tokens / step_s,
        }

    def _times(self, sums: StepSums, step_s: float) -> dict[str, Any]:
        consumers = self._ranks.num_consumers
        targets = self._ranks.num_targets or consumers
        taken = max(sums.get("num_taken"), 1)
        wait_s = max(self._reduced - self._begin - sums.get("work_s") / consumers, 0.0)
        # The optimizer's own update belongs to the drafter.
        update_s = time.perf_counter() - self._reduced
        shares = {
            "prefetch": sums.get("prefetch_s") / (consumers * step_s),
            "target": sums.get("target_s") / (targets * step_s),
            "draft": (sums.get("draft_s") / consumers + update_s) / step_s,
        }
        candidates = shares | {"wait": wait_s / step_s}
        return {
            "target_s": sums.get("target_s"),
            "draft_s": sums.get("draft_s"),
            "prefetch_s": sums.get("prefetch_s"),
            "feature_wait_s": sums.get("feature_wait_s") / consumers,
            "wait_s": wait_s,
            "busy_shares": shares,
            "queue_depths": {
                "prefetch": sums.get("num_waiting") / consumers,
                "features": sums.get("num_ahead") / taken,
            },
            "bottleneck": max(candidates, key=candidates.__getitem__),
            "peak_memory_bytes": int(sums.get("peak_memory_bytes")),
        }

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on alike."""
        return {"composition": self._composition.state(), "tokens": list(self._tokens)}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self._composition.load(state["composition"])
        self._tokens = list(state["tokens"])


class MetricsFile:
    """Appends one line per step; a full disk costs lines, not the run.

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
        try:
            self._stream.write(json.dumps(_finite(metrics), allow_nan=False) + "\n")
        except OSError as error:
            sys.stderr.write(f"the metrics of step {metrics['step']} are lost: {error.strerror}\n")

    def close(self) -> None:
        """Flush to disk and close."""
        try:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
        except OSError as error:
            sys.stderr.write(f"metrics were not written to the end: {error.strerror}\n")


def write_status(
    run_dir: Path,
    state: str,
    *,
    step: int = 0,
    num_steps: int = 0,
    reason: str = "",
    kind: str = "",
) -> None:
    """Write ``status.json``: running, finished, interrupted or failed, why, and by what error.

    That one rank still runs, or fails too, does not cover why another has failed first.
    """
    status = {"state": state, "step": step, "num_steps": num_steps, "reason": reason, "kind": kind}
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with (run_dir / ".status.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # no other rank writes between the look and the write
            if state in ("running", "failed"):
                found = read_status(run_dir)
                if found is not None and found.state == "failed":
                    return
            atomic_write(run_dir / STATUS_NAME, json.dumps(status) + "\n")
    except OSError as error:
        sys.stderr.write(f"status '{state}' was not written: {error.strerror}\n")


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process on its device; resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _finite(value: Any) -> Any:
    """Return JSON values with null for what is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return value


def _step_of(line: str) -> int:
    """Return a line's step; a line that a crash cut short counts as not written."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError):
        return 1 << 62
