"""How much memory there can still be, before it is taken: what a kernel gives and has not ends a
process. Imports no torch.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

#: After so many bytes more it is looked whether there can be memory for the rest: other processes
#: take theirs at the same time.
LOOK_BYTES = 256 << 20


def demand(size: int) -> None:
    """Raises MemoryError if so many bytes cannot be had."""
    if (left := left_bytes()) < size:
        raise MemoryError(f"{size} more are needed, and at most {left:.0f} are left")


def left_bytes(root: Path = Path("/")) -> float:
    """So many bytes of memory are left at the very most, on this machine (under `root`) and in the
    control groups (v2) that we are in: all that nobody holds for good. Endless if none tells."""
    proc, groups = root / "proc", root / "sys/fs/cgroup"
    limits, swap = [math.inf], 0.0
    with contextlib.suppress(OSError, LookupError, ValueError):
        told = numbers_in(proc / "meminfo")
        swap = told["SwapFree:"] << 10
        held = told["AnonPages:"] + told["Shmem:"] + told.get("Hugetlb:", 0)
        # Not all that can be freed counts as available: some file systems have their own caches.
        limits.append((max(told["MemAvailable:"], told["MemTotal:"] - held) << 10) + swap)
    with contextlib.suppress(OSError, LookupError, ValueError):
        lines = (proc / "self/cgroup").read_text().splitlines()
        (name,) = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
        for group in reversed([groups / name, *(groups / name).parents]):
            swap = min(swap, swap_left_in(group))  # what it may not swap those in it may not
            limits.append(left_in(group) + swap)
    return min(limits)


def swap_left_in(group: Path) -> float:
    """So many bytes of one control group may be swapped out yet."""
    try:
        most = (group / "memory.swap.max").read_text().strip()
        held = (group / "memory.swap.current").read_text().strip()
    except OSError:
        return math.inf
    return math.inf if most == "max" else max(0, int(most) - int(held))


def left_in(group: Path) -> float:
    """The same as `left_bytes`, of one control group and without swap."""
    try:
        most = (group / "memory.max").read_text().strip()
        if most == "max":
            return math.inf
        told = numbers_in(group / "memory.stat")
    except OSError:
        return math.inf
    return int(most) - told["anon"] - told["shmem"]


def numbers_in(path: Path) -> dict[str, int]:
    """The first number of each line of this file, by its first word. Raises OSError."""
    words = [line.split() for line in path.read_text().splitlines()]
    return {name: int(number) for name, number, *_unit in words}
