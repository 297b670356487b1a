"""`manage.py down` and `reset`: ending a home's product from elsewhere, and forgetting its data."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from controlplane.local import processes
from controlplane.local.up import holder

#: Longest that a whole product may take to stop, in seconds.
STOP_S = 120.0


def down(home: Path, say: Callable[[str], None]) -> bool:
    """Stop the product of this home, or what a killed run has left. False if it did not end."""
    running = holder(home)
    if running is None:
        swept = processes.sweep(home)
        say(f"stopped {swept} processes that a killed run had left" if swept else "nothing runs")
        return True
    process = psutil.Process(int(running["pid"]))
    say(f"stopping {running['url']} (process {process.pid})")
    os.kill(process.pid, signal.SIGTERM)
    began = time.monotonic()
    if processes.wait_gone([process], STOP_S):
        say(f"process {process.pid} still stops after {STOP_S:.0f} s; kill it and try again")
        return False
    say(f"stopped in {time.monotonic() - began:.0f} s")
    return True


def forget(home: Path) -> None:
    """Delete the data of a home that does not run."""
    shutil.rmtree(home)
