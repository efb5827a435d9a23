from pathlib import Path

import torch

from dflash_core.training.memory import usage as memory
from dflash_core.training.memory.usage import (
    cgroup_limits,
    memory_limit_bytes,
    peak_of,
    used_memory_bytes,
)

CPU = torch.device("cpu")
MIB = 2**20
SLACK = 24 * MIB


def fill(mebibytes):
    """Take memory, touch it, give it back."""
    torch.ones(mebibytes * MIB // 4).add_(1)


def fill_again(mebibytes, *, times):
    for _ in range(times):
        fill(mebibytes)


def test_memory_is_shared_among_the_ranks_of_a_machine():
    whole = memory_limit_bytes(CPU, sharing=1)
    assert memory_limit_bytes(CPU, sharing=4) == whole // 4
    assert 0 < used_memory_bytes(CPU) < whole


def test_a_peak_is_that_of_the_work_and_not_of_what_was_before():
    fill(300)
    before = used_memory_bytes(CPU)
    assert abs(peak_of(lambda: None, CPU) - before) < SLACK
    assert abs(peak_of(lambda: fill(100), CPU) - before - 100 * MIB) < SLACK


def test_where_the_kernel_keeps_no_peak_memory_is_looked_at_while_the_work_runs(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(memory, "FORGET_PEAK", (tmp_path / "missing" / "clear_refs", "5"))
    fill(300)
    before = used_memory_bytes(CPU)
    grown = peak_of(lambda: fill_again(100, times=10), CPU) - before
    assert 50 * MIB < grown < 100 * MIB + SLACK


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def test_the_limits_of_a_service_and_of_all_groups_above_it_are_found(tmp_path):
    write(tmp_path / "system.slice" / "run.service" / "memory.max", "4000")
    write(tmp_path / "system.slice" / "memory.max", "max")
    write(tmp_path / "memory.max", "9000")
    write(tmp_path / "user.slice" / "memory.max", "1")  # of others
    assert cgroup_limits("0::/system.slice/run.service\n", tmp_path) == [9000, 4000]


def test_the_limits_of_a_slurm_job_are_found_in_version_1(tmp_path):
    top = tmp_path / "memory"
    write(top / "memory.limit_in_bytes", "9223372036854771712")
    write(top / "slurm" / "uid_1" / "job_7" / "memory.limit_in_bytes", "5000")
    write(top / "slurm" / "uid_1" / "job_7" / "step_0" / "memory.limit_in_bytes", "6000")
    groups = "5:cpuset:/\n4:cpu,memory:/slurm/uid_1/job_7/step_0\n0::/\n"
    assert min(cgroup_limits(groups, tmp_path)) == 5000


def test_inside_a_container_the_path_of_the_host_leaves_the_top(tmp_path):
    write(tmp_path / "memory.max", "7000")
    assert cgroup_limits("0::/../../docker/abc\n", tmp_path) == [7000]
    assert cgroup_limits("", tmp_path) == []
