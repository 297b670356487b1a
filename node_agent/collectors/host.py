"""The host itself: processors, memory, kernel."""

from __future__ import annotations

import os
from pathlib import Path


def cpus() -> int:
    """Return the number of logical CPUs of the host; 0 if it is not known."""
    return os.cpu_count() or 0


def memory_bytes() -> int:
    """Total memory; 0 if the kernel does not say."""
    return _meminfo("MemTotal")


def available_bytes() -> int:
    """Return the bytes that programs can still take without swapping; 0 if the kernel does not say.

    The value is MemAvailable of /proc/meminfo, the kernel's own estimate (proc(5)).
    """
    return _meminfo("MemAvailable")


def kernel() -> str:
    """Return the kernel's release, as `uname -r` prints it."""
    return os.uname().release


def _meminfo(key: str) -> int:
    with Path("/proc/meminfo").open() as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name == key:
                return int(rest.split()[0]) * 1024
    return 0
