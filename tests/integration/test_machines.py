"""Two machines, played by two processes here: they meet, train together and go home together."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import tasks.launching.machines
from dflash_core.errors import ConfigError, TimeLimitError
from tasks.launching.launch import Launch
from tasks.launching.machines import Machines, follow
from tasks.launching.torchrun import run_torchrun
from tests.integration.places import ROOT, free_port
from tests.tasks.launching.test_torchrun import no_rank_lives, wait_until_ranks_wait

pytestmark = pytest.mark.integration


def machines(folder: Path) -> Machines:
    return Machines(2, f"127.0.0.1:{free_port()}", folder / "launches" / "some-run")


def test_a_second_machine_takes_part_in_every_launch_and_goes_home(tmp_path: Path) -> None:
    """Also where an earlier attempt of the flow run has left its end."""
    ours = machines(tmp_path)
    ours.announce(Launch(module="earlier", arguments=(), num_ranks=2))
    ours.over()
    ours.dismiss()
    other = subprocess.Popen(
        [
            *(sys.executable, "-m", "flows.cli", "join", "--root", str(tmp_path)),
            *("--flow-run", "some-run", "--patience", "100"),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[str] = []
    ours.begin()
    for _ in range(2):
        run_torchrun(
            "tests.tasks.launching.toy_rank",
            [str(tmp_path), "end"],
            num_ranks=2,
            run_dir=tmp_path,
            machines=ours,
            on_line=lines.append,
        )
    ours.dismiss()
    said, _ = other.communicate(timeout=100)
    assert other.returncode == 0, said
    assert "took part in 2 launches" in said
    here = [line for line in lines if line.startswith("rank ")]
    there = [line for line in said.splitlines() if line.startswith("rank ")]
    assert len(here) == len(there) == 2
    assert {line.split()[1] for line in here + there} == {"0", "1"}


def test_ranks_of_a_launch_that_is_over_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed attempt left it announced; a machine that came early waits there for nobody."""
    monkeypatch.setattr(tasks.launching.machines, "GRACE_S", 0.1)
    ours = replace(machines(tmp_path), nodes=1)
    ours.announce(
        Launch(
            module="tests.tasks.launching.toy_rank", arguments=(str(tmp_path), "wait"), num_ranks=2
        )
    )
    with ThreadPoolExecutor(1) as pool:

        def retry() -> None:
            wait_until_ranks_wait(tmp_path)
            ours.begin()
            ours.dismiss()

        flow = pool.submit(retry)
        assert follow(ours.folder, patience_s=100, on_line=[].append) == 0
        flow.result()
    assert no_rank_lives(tmp_path)


def test_a_machine_that_does_not_come_is_waited_for_so_long(tmp_path: Path) -> None:
    alone = replace(machines(tmp_path), meeting_limit_s=1)
    with pytest.raises(TimeLimitError, match=r"2 machines .* did not meet at .* within 1 s"):
        run_torchrun(
            "tests.tasks.launching.toy_rank", [], num_ranks=2, run_dir=tmp_path, machines=alone
        )


def test_ranks_that_cannot_be_shared_out_are_refused(tmp_path: Path) -> None:
    launch = Launch(module="m", arguments=(), num_ranks=3)
    with pytest.raises(ConfigError, match=r"3 ranks .* are no multiple of 2 machines"):
        machines(tmp_path).announce(launch)
