"""The host itself: processors, memory, kernel."""

from __future__ import annotations

import os
from pathlib import Path


def cpus() -> int:
    return os.cpu_count() or 0


def memory_bytes() -> int:
    """Total memory; 0 if the kernel does not say."""
    return _meminfo("MemTotal")


def available_bytes() -> int:
    return _meminfo("MemAvailable")


def kernel() -> str:
    return os.uname().release


def _meminfo(key: str) -> int:
    with Path("/proc/meminfo").open() as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name == key:
                return int(rest.split()[0]) * 1024
    return 0
