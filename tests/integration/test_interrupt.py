"""A whole run from the shell that gets SIGTERM: it saves, says 4, and leaves nothing running."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from flows.cli import EXIT_INTERRUPTED
from tests.integration.places import ROOT, wait_for
from tests.tasks.test_torchrun import alive

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


def test_sigterm_ends_a_run_with_all_that_it_started(tmp_path: Path) -> None:
    words = ["--run.root", str(tmp_path), "--run.name", "ended", "--training.epochs", "300"]
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.cli", "run", "--config", "configs/tiny.toml", *words],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ.copy(),
    )
    metrics = tmp_path / "ended" / "training" / "metrics.jsonl"
    wait_for(lambda: metrics.is_file() and metrics.stat().st_size, what="a step")
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=240)
    assert process.returncode == EXIT_INTERRUPTED, told
    assert told.rstrip().endswith("dflash-flow: interrupted")
    assert len(started) >= 3  # torchrun, its ranks, Prefect's own server
    # What nobody collects is dead too: the first process of a container may never do so.
    left = psutil.wait_procs(started, timeout=60)[1]
    assert not [process for process in left if alive(process.pid)]
    assert list((metrics.parent / "checkpoints").glob("step-*"))
