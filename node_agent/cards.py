"""The file that describes a simulated machine's cards, and the one way to change it.

The chassis and the agent both write it, so every change is made under a lock between processes
and replaces the file whole. Standard library only.

Beside what names a card there may stand: `unreadable` (it does not answer), `dead` (nor will it
after a boot), `contained` (a memory error that waits for a reset), `drifts_since` (its corrected
errors come ever faster), the counters, what NVML says of its memory (`remap_pending`,
`remap_failed`, `sram_over_threshold`, `recovery_action`, `remapped_rows`, `exhausted_banks`), of
its links and clocks (`nvlink_share`, `nvlink_errors_since`, `heats_since`, `throttle_reasons`,
`pcie_lanes`, `pcie_replays_since`), and of the fabric's port beside it (`port_down`,
`port_flaps_since`, `port_errors_since`). What ends in `_since` began at that moment in Unix time.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from node_agent.files import write_atomically

HARDWARE_FILE = "hardware.json"
LOCK_FILE = "hardware.lock"

Cards = list[dict[str, Any]]


def edit(folder: Path, change: Callable[[Cards], Cards]) -> Cards:
    """Replace the cards by `change` of those that are fitted now; returns the new ones.

    What `change` raises passes through, and the file stays as it was. OSError if it cannot be read
    or written.
    """
    with locked(folder):
        path = folder / HARDWARE_FILE
        fitted: Cards = json.loads(path.read_bytes())["gpus"] if path.exists() else []
        cards = change(fitted)
        write_atomically(path, json.dumps({"gpus": cards}, indent=1).encode(), mode=0o644)
        return cards


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Nobody else changes the cards meanwhile. Whoever dies has let go."""
    fd = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
