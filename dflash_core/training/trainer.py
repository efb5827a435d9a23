"""The loop: steps of the plan, one reduction each, measurements, checkpoints, a way to stop."""

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_core.artifacts import atomic_write
from dflash_core.config import changed
from dflash_core.errors import TrainingError
from dflash_core.training.batches.schedule import Epochs, Work, in_rounds
from dflash_core.training.checkpoint import (
    Cursor,
    checkpoint_path,
    checkpoints_folder,
    give_up,
    latest_step,
    load_checkpoint,
    save_checkpoint,
)
from dflash_core.training.config import TrainingJob
from dflash_core.training.features.pipeline import Pipeline
from dflash_core.training.features.transfer import Ready
from dflash_core.training.flat import FlatGradients
from dflash_core.training.memory.preflight import consumer_run, preflight
from dflash_core.training.objectives.base import Objective
from dflash_core.training.optimizer import build_optimizer, learning_rate, set_learning_rate
from dflash_core.training.ranks.fsdp import load_spread, whole
from dflash_core.training.ranks.groups import Ranks
from dflash_core.training.ranks.stop import StopRequest
from dflash_core.training.telemetry.metrics import MetricsFile, StepMonitor, StepSums, write_status
from dflash_core.training.telemetry.validation import Validation

__all__ = ["MEMORY_NAME", "Trainer"]

MEMORY_NAME = "memory.json"
ABSURD = 2.0  # times the loss of guessing, and the first: no model that learns is there


class Trainer:
    """Runs a job on this rank, in step with the other consuming ranks.

    Args:
        job: The run.
        objective: What is trained; its weights are made alike on all ranks.
        epochs: The plans.
        validation: Measurements on held-out samples.
        ranks: This process among the others.
        cursor: Where the run goes on.
        stop: The request to stop.
    """

    def __init__(
        self,
        job: TrainingJob,
        objective: Objective,
        epochs: Epochs,
        validation: Validation,
        ranks: Ranks,
        cursor: Cursor,
        stop: StopRequest,
    ) -> None:
        self._job = job
        self._objective = objective
        self._epochs = epochs
        self._validation = validation
        self._ranks = ranks
        self._stop = stop
        self._cursor = cursor
        parameters = [p for p in objective.module.parameters() if p.requires_grad]
        self._gradients = FlatGradients(parameters)
        self._optimizer = build_optimizer(parameters, job.training.optimizer)
        self._monitor = StepMonitor(epochs, objective, ranks)
        self._save_s = 0.0
        self._before_best = cursor
        self._learnt_step = cursor.step  # since then nothing was learnt
        self._sane_step = cursor.step  # since then every loss was of a model that is astray
        if cursor.step:
            self._load(cursor.step)

    @property
    def cursor(self) -> Cursor:
        """Where the run is."""
        return self._cursor

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return checkpoints_folder(self._job.run_dir)

    def run(self, pipeline: Pipeline) -> bool:
        """Train to the end, until there is no more gain, or until asked to stop.

        Returns:
            Whether the run is finished; otherwise it can be resumed.

        Raises:
            TrainingError: Too many steps in a row, or the last ones, without a finite loss, weights
                that are not finite or far from anything learnt at the end, or another rank left.
        """
        metrics = None
        if self._ranks.is_first:
            metrics = MetricsFile(self._job.run_dir, keep_steps=self._cursor.step)
        self._tell("running")
        try:
            while self._cursor.step < self._epochs.num_steps and not self._patience_is_over:
                # What is shared is gathered for measurements and checkpoints too.
                with self._ranks.together(f"step {self._cursor.step + 1}"):
                    line, stop = self._step(pipeline)
                    worth_keeping = self._measure(pipeline, line)
                    if metrics is not None:
                        metrics.write(line)
                    if stop and self._cursor.step < self._epochs.num_steps:
                        self._stop_here()
                        return False
                    self._save_if_due(worth_keeping)
            if self._is_astray:
                raise self._diverged("which is the last")
            return True
        except BaseException:
            pipeline.abandon()
            raise
        finally:
            if metrics is not None:
                metrics.close()

    def preflight(self, pipeline: Pipeline, *, cache_bytes: int) -> None:
        """Run the largest micro-batches before the first step, without learning from them.

        Args:
            pipeline: Gives the target's features.
            cache_bytes: What keeping all features on disk would take.

        Raises:
            TrainingError: One needs more memory than there is.
        """
        with consumer_run(
            self._objective,
            pipeline.features_of,
            self._gradients,
            self._optimizer,
            self._ranks.device,
        ) as run:
            report = preflight(self._epochs, run, self._ranks, cache_bytes=cache_bytes)
        if self._ranks.is_first:
            file = self._job.run_dir / MEMORY_NAME
            atomic_write(file, report.model_dump_json(indent=1) + "\n")
            print(report, flush=True)  # noqa: T201  (torchrun's own log)

    def best_weights(self) -> tuple[int, dict[str, Tensor]]:
        """Return step and whole weights of the best measurement, or the last ones without it.

        Every consuming rank calls this; the weights are rank 0's.
        """
        step = self._cursor.best_step or 0
        path = checkpoint_path(self.checkpoints, step)
        kept = torch.tensor([float(self._ranks.is_first and path.is_dir())])
        if not self._ranks.add(kept.to(self._ranks.device), what="the best weights"):
            with self._ranks.together("the best weights"):
                return self._cursor.step, self._weights()
        return step, load_checkpoint(path)["module"] if self._ranks.is_first else {}

    def _weights(self) -> dict[str, Tensor]:
        state = self._objective.module.state_dict(keep_vars=True)
        return whole(state, keep=self._ranks.is_first)

    def _step(self, pipeline: Pipeline) -> tuple[dict[str, Any], bool]:
        step = self._cursor.step
        self._monitor.begin(pipeline)
        self._gradients.zero()
        sums = StepSums.zeros(self._objective)
        where = f"step {step + 1}"
        works = self._own(self._epochs.work(step))
        last = None
        for ready in pipeline.follow(works, self._objective.idle):
            self._learn(ready, sums)
            last = ready if ready.work.micro_batch.weight > 0 else last
        self._monitor.end_of_work(pipeline, sums, asked_to_stop=self._stop.asked)
        # Between hosts, and first: who does not come is named, before a device waits for them.
        self._ranks.add(sums.flat, what=where)
        self._gradients.add_up(self._ranks, what=where)
        self._monitor.reduced()
        rate = learning_rate(step, self._epochs.num_steps, self._job.training.optimizer)
        norm, skipped = self._update(sums, rate)
        self._advance(skipped)
        line = self._monitor.describe(step, sums)
        line |= {
            "grad_norm": norm,
            "learning_rate": rate,
            "skipped": skipped,
            "skipped_steps": self._cursor.skipped_steps,
        }
        if self._cursor.step == self._epochs.num_steps and not self._is_astray:
            self._judge_last_update(last)
        return line, sums.asked_to_stop

    def _learn(self, ready: Ready, sums: StepSums) -> None:
        begin = time.perf_counter()
        micro_batch = ready.work.micro_batch
        groups = self._monitor.groups(micro_batch)
        outcome = self._objective.run(micro_batch, ready.batch, ready.features_MF, groups)
        sums.add(outcome, ready, time.perf_counter() - begin)

    def _update(self, sums: StepSums, rate: float) -> tuple[float, bool]:
        """Apply the step's gradient, unless it is not finite; every rank decides alike."""
        loss, weight = float(sums.objective[0]), float(sums.objective[1])
        if weight <= 0:
            return 0.0, False  # no sample of the step has anything to learn from
        norm = self._gradients.normalise(weight, self._job.training.optimizer.grad_clip)
        if not (math.isfinite(norm) and math.isfinite(loss)):
            return norm, True
        set_learning_rate(self._optimizer, rate)
        self._optimizer.step()
        self._learnt_step = self._cursor.step + 1
        self._judge(loss / weight)
        return norm, False

    def _judge(self, loss: float) -> None:
        """Note whether a loss is of a model that learns; every rank judges alike."""
        first = loss if self._cursor.first_loss is None else self._cursor.first_loss
        self._move(first_loss=first)
        if loss <= ABSURD * max(first, self._objective.guess_loss):
            self._sane_step = self._learnt_step

    def _judge_last_update(self, ready: Ready | None) -> None:
        """Run the weights that no step follows once, on what this rank has just learnt from."""
        sums = StepSums.zeros(self._objective)
        self._learnt_step += 1  # as a step after it would
        with torch.no_grad():
            if ready is None:
                self._objective.idle()
            else:
                self._learn(ready, sums)
        self._ranks.add(sums.flat, what=f"the loss after step {self._cursor.step}")
        loss, weight = sums.objective[:2].tolist()
        self._judge(loss / (weight if weight > 0 else 1.0))

    @property
    def _is_astray(self) -> bool:
        """Whether the last losses were not finite, or far worse than guessing."""
        return self._cursor.bad_steps > 0 or self._sane_step < self._learnt_step

    def _advance(self, skipped: bool) -> None:
        step, limit = self._cursor.step + 1, self._job.training.max_bad_steps
        # A step without anything to learn from says nothing of the weights.
        bad_steps = self._cursor.bad_steps + skipped if self._learnt_step < step else 0
        self._move(
            step=step, bad_steps=bad_steps, skipped_steps=self._cursor.skipped_steps + skipped
        )
        if bad_steps > limit:
            raise self._diverged(f"the limit is training.max_bad_steps {limit}")

    def _diverged(self, where: str) -> TrainingError:
        """Return the failure, and put aside the weights that no step has shown to be good."""
        if self._ranks.is_first:
            give_up(self.checkpoints, step=self._sane_step)
        what = "the weights are not finite after"
        if self._cursor.bad_steps:
            what = f"the loss was not finite in {self._cursor.bad_steps} steps in a row up to"
        elif self._is_astray:
            what = (
                f"the loss is not a number or more than {ABSURD:g} times that of guessing "
                f"({self._objective.guess_loss:.3g}) and of the first step "
                f"({self._cursor.first_loss:.3g}) after"
            )
        return TrainingError(
            f"{what} step {self._cursor.step}, {where}; lower training.optimizer.learning_rate, "
            "and the same run goes on from its last good checkpoint, or from the start without one"
        )

    def _measure(self, pipeline: Pipeline, line: dict[str, Any]) -> bool:
        """Measure held-out samples if they are due.

        Returns:
            Whether to keep this step: the model is the best yet, or decoding took what a run that
            is started again should not take twice.
        """
        step = self._cursor.step - 1
        if not self._epochs.is_due(step):
            return False
        works = self._own(self._epochs.held_out_work(step))
        found = self._validation.measure(step, works, pipeline)
        line |= found.metrics
        if found.score is None or not math.isfinite(found.score) or self._is_astray:
            return False
        best = self._cursor.best_score
        gained = best is None or found.score > best
        num_worse = 0 if gained else self._cursor.num_worse + 1
        if best is not None and found.score < best:
            self._move(num_worse=num_worse)
            return "held_out_acceptance" in found.metrics
        # Of equal ones the later has learnt longer: an acceptance of 1 may stand for a while.
        self._before_best = self._cursor
        self._move(best_step=step + 1, best_score=found.score, num_worse=num_worse)
        return True

    @property
    def _patience_is_over(self) -> bool:
        patience = self._job.training.validation.patience
        return patience is not None and self._cursor.num_worse >= patience

    def _own(self, works: list[Work]) -> list[Work | None]:
        """Return this rank's works; None for each round where it only helps others."""
        if self._ranks.sharing is not None or self._ranks.spread is not None:
            return list(in_rounds(works, consumer=self._ranks.rank))
        return [work for work in works if work.consumer == self._ranks.rank]

    def _move(self, **changes: Any) -> None:
        self._cursor = changed(self._cursor, changes)

    def _load(self, step: int) -> None:
        mapped = self._ranks.spread is not None
        state = load_checkpoint(checkpoint_path(self.checkpoints, step), mapped=mapped)
        load_spread(self._objective.module, self._optimizer, state)
        self._monitor.load(state["monitor"])
        self._validation.load(state["validation"])
        torch.set_rng_state(state["rng"])

    def _save_if_due(self, worth_keeping: bool) -> None:
        step, every = self._cursor.step, self._job.training.checkpoint_every_steps
        if self._is_astray:
            return
        over = step >= self._epochs.num_steps or self._patience_is_over
        if worth_keeping or over or step % every == 0:
            self._save()

    def _stop_here(self) -> None:
        """Save within the time that a stop leaves; every rank decides alike."""
        limit = self._job.training.shutdown_save_s
        why = f"a checkpoint takes {self._save_s:.0f} s and the limit is {limit:.0f} s"
        if self._is_astray or self._save_s > limit:
            why = "the last losses were those of a diverged run" if self._is_astray else why
            last = latest_step(self.checkpoints)
            reason = f"asked to stop; {why}, so the run goes on from step {last}"
        else:
            self._save()
            reason = "asked to stop"
        self._tell("interrupted", reason)

    def _save(self) -> None:
        begin = time.perf_counter()
        weights, lost = self._weights(), 0.0
        moments = whole(self._optimizer.state_dict(), keep=self._ranks.is_first)
        broken = self._ranks.is_first and any(not t.isfinite().all() for t in weights.values())
        if self._ranks.is_first and not broken:
            state = {
                "module": weights,
                "optimizer": moments,
                "monitor": self._monitor.state(),
                "validation": self._validation.state(),
                "rng": torch.get_rng_state(),
            }
            keep = self._job.training.keep_checkpoints
            try:
                save_checkpoint(self.checkpoints, state, self._cursor, keep=keep)
            except OSError as error:
                lost = 1.0
                print(  # noqa: T201  (torchrun's own log)
                    f"checkpoint at step {self._cursor.step} was not written "
                    f"({error.strerror}); the last good one stays and training goes on",
                    flush=True,
                )
            self._tell("running")
        took_s = time.perf_counter() - begin
        told = torch.tensor([took_s, lost, float(broken)]) * self._ranks.is_first
        what = f"the checkpoint of step {self._cursor.step}"
        told = self._ranks.add(told.to(self._ranks.device), what=what)
        self._save_s, lost, broken = told.tolist()
        if broken:
            raise self._diverged("where a checkpoint was due")
        if lost and self._cursor.best_step == self._cursor.step:
            # What was not kept cannot be exported: the best before it is the best again.
            kept = self._before_best
            self._move(best_step=kept.best_step, best_score=kept.best_score)

    def _tell(self, state: str, reason: str = "") -> None:
        if self._ranks.is_first:
            write_status(
                self._job.run_dir,
                state,
                step=self._cursor.step,
                num_steps=self._epochs.num_steps,
                reason=reason,
            )
