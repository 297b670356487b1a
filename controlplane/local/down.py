"""`manage.py down` and `reset`: ending a home's product from elsewhere, and forgetting its data."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from controlplane.local import processes
from controlplane.local.up import holder, locked

#: Longest that a whole product may take to stop, in seconds.
STOP_S = 120.0


def down(home: Path, say: Callable[[str], None]) -> bool:
    """Stop the product of this home, or what a killed run has left. False if it did not end."""
    running = holder(home)
    if running and not _stop(int(running["pid"]), str(running["url"]), say):
        return False
    with _alone(home):
        swept = processes.sweep(home)
    if swept:
        say(f"stopped {swept} processes that a killed run had left")
    elif not running:
        say("nothing runs")
    return True


@contextmanager
def _alone(home: Path) -> Iterator[None]:
    """Let nothing start in this home meanwhile. Ends the command where something just does."""
    with ExitStack() as held:
        try:
            held.enter_context(locked(home))
        except BlockingIOError as error:
            sys.exit(str(error))
        yield


def _stop(pid: int, url: str, say: Callable[[str], None]) -> bool:
    """Ask an `up` to stop, and wait until it has. False if it did not end."""
    say(f"stopping {url} (process {pid})")
    began = time.monotonic()
    try:
        process = psutil.Process(pid)
        process.send_signal(signal.SIGTERM)
    except psutil.NoSuchProcess:
        return True
    if processes.wait_gone([process], STOP_S):
        say(f"process {pid} still stops after {STOP_S:.0f} s; kill it and try again")
        return False
    say(f"stopped in {time.monotonic() - began:.0f} s")
    return True


def forgotten(home: Path) -> Path:
    """Where the data of a home lies while it is deleted."""
    return home.with_name(f"{home.name}.forgotten")


def forget(home: Path) -> None:
    """Delete the data of a home that does not run, and what an earlier call was not let delete.

    Cut short, it leaves no home that has its database without its keys.
    """
    doomed = forgotten(home)
    if doomed.exists():
        shutil.rmtree(doomed)
    if home.exists():
        with _alone(home):
            _delete(home, doomed)


def _delete(home: Path, doomed: Path) -> None:
    try:
        home.rename(doomed)
    except OSError:  # a mount point, or a folder that we may not write to
        (home / "postgres" / "PG_VERSION").unlink(missing_ok=True)
        shutil.rmtree(home / "postgres", ignore_errors=True)
        shutil.rmtree(home)
    else:
        shutil.rmtree(doomed)
