"""What the Dockerfile installs, replayed step by step in an empty environment."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.places import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

VENV = "/opt/venv"


def stages() -> list[str]:
    """Return the stages of the Dockerfile, comments gone and continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M)
    return re.split(r"^FROM .*$", text.replace("\\\n", " "), flags=re.M)[1:]


def instructions(stage: str, word: str) -> list[list[str]]:
    return [shlex.split(line)[1:] for line in stage.splitlines() if line.startswith(f"{word} ")]


def copy(stage: str, into: Path) -> None:
    """Copy what a stage takes from the build context."""
    into.mkdir(parents=True)
    for words in instructions(stage, "COPY"):
        if words[0].startswith("--from"):
            continue
        *sources, target = (word for word in words if not word.startswith("--chown"))
        for source in map(Path, sources):
            place = into if target == "./" else into / target
            if (ROOT / source).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / source, place, ignore=ignored)
            else:
                shutil.copy(ROOT / source, place)


def run(command: list[str], cwd: Path) -> str:
    # Compiling modules ahead of their use would only take time here.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment |= {"PIP_NO_COMPILE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{shlex.join(command)}:\n{done.stdout}"
    return done.stdout


def versions(requirements: str) -> set[tuple[str, str]]:
    """Return names, in the one way of writing them that all programs agree on, and versions."""
    lines = [line.partition("==") for line in requirements.splitlines() if "==" in line]
    return {(re.sub(r"[-_.]+", "-", name).lower(), version) for name, _, version in lines}


def test_install_steps_give_a_worker_with_every_flow(tmp_path: Path) -> None:
    builder, final = stages()
    source, app, venv = tmp_path / "src", tmp_path / "app", tmp_path / "venv"
    copy(builder, source)
    copy(final, app)
    (constraints,) = (a for a in instructions(builder, "ARG") if a[0].startswith("CONSTRAINTS="))
    arguments = constraints[0].partition("=")[2].split()
    steps = [s for s in instructions(builder, "RUN") if any(VENV in word for word in s)]
    assert [step[0] for step in steps] == ["python3", f"{VENV}/bin/pip"]
    for step in steps:
        words = [
            given
            for word in step
            for given in (
                arguments if word == "${CONSTRAINTS}" else [word.replace(VENV, str(venv))]
            )
        ]
        words[0] = sys.executable if words[0] == "python3" else words[0]
        run(words, source)

    python = str(venv / "bin" / "python")
    run([python, "-m", "pip", "check"], app)
    pinned = versions((ROOT / "constraints-image.txt").read_text())
    installed = versions(run([python, "-m", "pip", "freeze", "--exclude", "dflash-flows"], app))
    assert {name for name, _ in installed - pinned} == {"torch"}
    help_text = run([str(venv / "bin" / "prefect"), "worker", "start", "--help"], app)
    assert "--with-healthcheck" in help_text
    assert "whole chain" in run([str(venv / "bin" / "dflash-flow"), "--help"], app)
    flows = sorted(file.stem for file in (app / "flows").glob("[a-z]*.py") if file.stem != "steps")
    loaded = "; ".join(f"from flows.{name} import {name}" for name in flows)
    run([python, "-c", loaded], app)
