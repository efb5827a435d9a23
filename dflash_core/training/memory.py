"""How much memory a rank uses now, and how much there is."""

from pathlib import Path

import torch

__all__ = ["memory_limit_bytes", "used_memory_bytes"]

CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def used_memory_bytes(device: torch.device) -> int:
    """Return the memory that this process uses on its device now."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _kib(Path("/proc/self/status"), "VmRSS")


def memory_limit_bytes(device: torch.device, *, sharing: int) -> int:
    """Return the memory that one rank may use.

    On a CPU that is its share of the cgroup's limit or of the machine, whichever is less: the
    kernel's OOM killer raises nothing, it ends a rank.

    Args:
        device: Where the rank computes.
        sharing: Ranks that share a CPU's memory.
    """
    if device.type == "cuda":
        # What other processes hold on this GPU is not ours to use.
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    limits = [_kib(Path("/proc/meminfo"), "MemTotal")]
    for file in CGROUP_LIMITS:
        text = file.read_text().strip() if file.is_file() else "max"
        if text.isdigit():
            limits.append(int(text))
    return min(limits) // sharing


def _kib(file: Path, name: str) -> int:
    for line in file.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{file} has no line {name}")
