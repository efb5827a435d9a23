"""How much memory a rank uses, how much a piece of work needs, and how much there is."""

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

__all__ = ["cgroup_limits", "memory_limit_bytes", "peak_of", "used_memory_bytes"]

STATUS = Path("/proc/self/status")
FORGET_PEAK = Path("/proc/self/clear_refs"), "5"  # see proc(5)
CGROUPS = Path("/sys/fs/cgroup")
SAMPLE_S = 0.002


def used_memory_bytes(device: torch.device) -> int:
    """Return the memory that this process uses on its device now."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with contextlib.suppress(AttributeError):  # other C libraries have no such call
        ctypes.CDLL(None).malloc_trim(0)  # what was freed and only kept is not in use
    return _kib(STATUS, "VmRSS")


def peak_of(work: Callable[[], None], device: torch.device) -> int:
    """Do some work and return the most memory that this process used on its device meanwhile."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device)
    if _forget_peak():
        work()
        return _kib(STATUS, "VmHWM")
    with _sampled() as highest:
        work()
    return max(highest)


def memory_limit_bytes(device: torch.device, *, sharing: int) -> int:
    """Return the memory that one rank may use.

    On a CPU that is its share of the cgroups' limit or of the machine, whichever is less: the
    kernel's OOM killer raises nothing, it ends a rank.

    Args:
        device: Where the rank computes.
        sharing: Ranks that share a CPU's memory.
    """
    if device.type == "cuda":
        # What other processes hold on this GPU is not ours to use.
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    whole = _kib(Path("/proc/meminfo"), "MemTotal")
    own = Path("/proc/self/cgroup")
    groups = own.read_text() if own.is_file() else ""
    return min([whole, *cgroup_limits(groups, CGROUPS)]) // sharing


def cgroup_limits(groups: str, root: Path) -> list[int]:
    """Return every memory limit that holds for a process, its own group's and those above it.

    Args:
        groups: What ``/proc/PID/cgroup`` says: ``0::/path`` (version 2), and ``N:memory:/path``
            (version 1).
        root: Where the hierarchies are mounted.
    """
    limits = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        # Seen from inside a container the path may not exist below the mount: its top still does.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            file = top.joinpath(*parts[:depth], name)
            text = file.read_text().strip() if file.is_file() else "max"
            if text.isdigit():
                limits.append(int(text))
    return limits


def _forget_peak() -> bool:
    """Let the kernel's count of the peak begin anew; some sandboxes cannot."""
    file, word = FORGET_PEAK
    try:
        file.write_text(word)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _sampled() -> Iterator[list[int]]:
    """Look at the resident memory again and again from a thread of its own."""
    highest = [_kib(STATUS, "VmRSS")]
    over = threading.Event()

    def look() -> None:
        while not over.wait(SAMPLE_S):
            highest[0] = max(highest[0], _kib(STATUS, "VmRSS"))

    thread = threading.Thread(target=look, name="memory", daemon=True)
    thread.start()
    try:
        yield highest
    finally:
        over.set()
        thread.join()


def _kib(file: Path, name: str) -> int:
    for line in file.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{file} has no line {name}")
