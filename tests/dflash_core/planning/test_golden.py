"""Plans are the same bytes as ever, compiled or not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_core.planning import STRATEGIES
from tests.dflash_core.planning.golden import GOLDEN, golden_plans

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_plans_equal_the_frozen_ones(strategy):
    frozen = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert golden_plans()[strategy] == frozen[strategy], (
        "a plan changed: raise PLANNER_VERSION, run python -m tests.dflash_core.planning.golden "
        "and give the reason in the pull request"
    )


def test_plain_python_gives_the_same_bytes():
    """With the compiled helpers off, so that their lines are seen and their errors surface."""
    script = (
        "import json; from tests.dflash_core.planning.golden import golden_plans;"
        "print(json.dumps(golden_plans()))"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        cwd=ROOT,
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == json.loads(GOLDEN.read_text(encoding="utf-8"))
