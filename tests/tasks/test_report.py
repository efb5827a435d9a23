"""The facts of a training for its report."""

import json
from pathlib import Path

import pytest

from dflash_core.errors import TrainingError
from dflash_core.reporting.summary import StrategyFacts
from dflash_core.throughput import Accuracy
from dflash_core.training.config import TrainingJob
from tasks.report import training_facts


def test_a_training_that_skipped_every_step_is_an_error(tmp_path: Path) -> None:
    """Two steps are too few for training.max_bad_steps to stop it."""
    lines = (json.dumps({"step": step, "loss": None}) + "\n" for step in (1, 2))
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    job = TrainingJob.model_construct(run_dir=tmp_path)
    with pytest.raises(TrainingError, match=r"none of the 2 steps .*had a finite loss"):
        training_facts(job, StrategyFacts.model_construct(), Accuracy.model_construct())
