"""The loop: steps of the plan, one reduction each, checkpoints, a way to stop at any step."""

import math
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_core.errors import TrainingError
from dflash_core.training.checkpoint import (
    Cursor,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from dflash_core.training.config import TrainingJob
from dflash_core.training.epochs import Epochs
from dflash_core.training.flat import FlatGradients
from dflash_core.training.monitor import MetricsFile, peak_memory_bytes, write_status
from dflash_core.training.objective import Objective
from dflash_core.training.optimizer import build_optimizer, learning_rate, set_learning_rate
from dflash_core.training.ranks import Ranks

__all__ = ["Trainer"]


class Trainer:
    """Runs a job on this rank, in step with the others.

    Args:
        job: The run.
        objective: What is trained; its weights are made alike on all ranks.
        epochs: The plans.
        ranks: This process among the others.
        ingredients: What a checkpoint must have been made of to be resumed.
    """

    def __init__(
        self,
        job: TrainingJob,
        objective: Objective,
        epochs: Epochs,
        ranks: Ranks,
        ingredients: dict[str, str],
    ) -> None:
        self._job = job
        self._objective = objective
        self._epochs = epochs
        self._ranks = ranks
        self._ingredients = ingredients
        parameters = [p for p in objective.module.parameters() if p.requires_grad]
        self._gradients = FlatGradients(parameters)
        self._optimizer = build_optimizer(parameters, job.training.optimizer)
        self._stop_asked = False
        self._cursor = Cursor(
            step=0, epoch=0, step_in_epoch=0, bad_steps=0, ingredients=ingredients
        )
        signal.signal(signal.SIGTERM, self._ask_to_stop)

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self._job.run_dir / "checkpoints"

    def run(self) -> bool:
        """Train to the end, or until asked to stop.

        Returns:
            Whether the run is finished; otherwise it was saved and can be resumed.

        Raises:
            TrainingError: Too many steps in a row without a finite loss, or another rank left.
        """
        self._resume()
        first = self._ranks.is_first
        metrics = MetricsFile(self._job.run_dir, keep_steps=self._cursor.step) if first else None
        self._tell("running")
        try:
            while self._cursor.step < self._epochs.num_steps:
                line, stop = self._step()
                if metrics is not None:
                    metrics.write(line)
                every = self._job.training.checkpoint_every_steps
                done = self._cursor.step >= self._epochs.num_steps
                if stop or done or self._cursor.step % every == 0:
                    self._save()
                if stop and not done:
                    self._tell("interrupted", "asked to stop")
                    return False
        finally:
            if metrics is not None:
                metrics.close()
        return True

    def _step(self) -> tuple[dict[str, Any], bool]:
        cursor, training = self._cursor, self._job.training
        begin = time.perf_counter()
        self._gradients.zero()
        sums = torch.zeros(self._objective.num_sums, dtype=torch.float64)
        for micro_batch in self._epochs.micro_batches(
            cursor.epoch, cursor.step_in_epoch, self._ranks.rank
        ):
            sums += self._objective.run(micro_batch)
        busy_s = time.perf_counter() - begin
        where = f"step {cursor.step + 1}"
        extra = [busy_s, peak_memory_bytes(self._ranks.device), float(self._stop_asked)]
        shared = torch.cat([sums, torch.tensor(extra, dtype=torch.float64)])
        shared = self._ranks.add(shared.to(self._ranks.device), what=where).cpu()
        self._ranks.add(self._gradients.buffer, what=where)
        rate = learning_rate(cursor.step, self._epochs.num_steps, training.optimizer)
        norm, skipped = self._update(shared, rate)
        stop = bool(shared[-1])
        line = self._describe(shared, rate, norm, skipped, begin)
        self._advance(skipped)
        return line, stop

    def _update(self, shared: Tensor, rate: float) -> tuple[float, bool]:
        """Apply the step's gradient, unless it is not finite; every rank decides alike."""
        weight = float(shared[1])
        if weight <= 0:
            return 0.0, False  # no sample of the step has anything to learn from
        norm = self._gradients.normalise(weight, self._job.training.optimizer.grad_clip)
        if not (math.isfinite(norm) and math.isfinite(float(shared[0]))):
            return norm, True
        set_learning_rate(self._optimizer, rate)
        self._optimizer.step()
        return norm, False

    def _advance(self, skipped: bool) -> None:
        cursor = self._cursor
        bad_steps = cursor.bad_steps + 1 if skipped else 0
        limit = self._job.training.max_bad_steps
        if bad_steps > limit:
            raise TrainingError(
                f"the loss was not finite in {bad_steps} steps in a row up to step "
                f"{cursor.step + 1}, the limit is {limit}; lower "
                "training.optimizer.learning_rate or raise training.max_bad_steps"
            )
        epoch, step = cursor.epoch, cursor.step_in_epoch + 1
        if step == self._epochs.steps_per_epoch[epoch]:
            epoch, step = epoch + 1, 0
        self._cursor = cursor.model_copy(
            update={
                "step": cursor.step + 1,
                "epoch": epoch,
                "step_in_epoch": step,
                "bad_steps": bad_steps,
            }
        )

    def _describe(
        self, shared: Tensor, rate: float, norm: float, skipped: bool, begin: float
    ) -> dict[str, Any]:
        cursor, world_size = self._cursor, self._ranks.world_size
        counts = self._epochs.counts(cursor.epoch, cursor.step_in_epoch)
        described = self._objective.describe(shared[: self._objective.num_sums])
        step_s = time.perf_counter() - begin
        busy_s = float(shared[-3]) / world_size
        stages = {
            "target": described.get("target_s", 0.0) / world_size,
            "draft": described.get("draft_s", busy_s) / world_size,
            "wait": max(step_s - busy_s, 0.0),
        }
        return {
            "step": cursor.step + 1,
            "num_steps": self._epochs.num_steps,
            "epoch": cursor.epoch,
            "epoch_progress": (cursor.step_in_epoch + 1)
            / self._epochs.steps_per_epoch[cursor.epoch],
            **described,
            "grad_norm": norm,
            "learning_rate": rate,
            "skipped": skipped,
            "real_tokens": counts.real_tokens,
            "token_slots": counts.token_slots,
            "supervised_tokens": counts.supervised_tokens,
            "padding_efficiency": counts.real_tokens / counts.token_slots,
            "step_s": step_s,
            "real_tokens_per_s": counts.real_tokens / step_s,
            "slots_per_s": counts.token_slots / step_s,
            "wait_s": stages["wait"],
            "bottleneck": max(stages, key=lambda name: stages[name]),
            "peak_memory_bytes": int(shared[-2]),
        }

    def _resume(self) -> None:
        latest = latest_checkpoint(self.checkpoints) if self._job.training.resume else None
        if latest is None:
            return
        loaded = load_checkpoint(latest, self._ingredients)
        self._objective.module.load_state_dict(loaded.state["module"])
        self._optimizer.load_state_dict(loaded.state["optimizer"])
        torch.set_rng_state(loaded.state["rng"])
        self._cursor = loaded.cursor

    def _save(self) -> None:
        if self._ranks.is_first:
            keep = self._job.training.keep_checkpoints
            try:
                save_checkpoint(
                    self.checkpoints,
                    self._objective.module,
                    self._optimizer,
                    self._cursor,
                    keep=keep,
                )
            except OSError as error:
                print(  # noqa: T201  (torchrun's own log)
                    f"checkpoint at step {self._cursor.step} was not written "
                    f"({error.strerror}); the last good one stays and training goes on",
                    flush=True,
                )
            self._tell("running")
        self._ranks.meet(what=f"the checkpoint of step {self._cursor.step}")

    def _tell(self, state: str, reason: str = "") -> None:
        if self._ranks.is_first:
            write_status(
                self._job.run_dir,
                state,
                step=self._cursor.step,
                num_steps=self._epochs.num_steps,
                reason=reason,
            )

    def _ask_to_stop(self, number: int, frame: Any) -> None:
        self._stop_asked = True
