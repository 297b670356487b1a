"""`manage.py down` and `reset`: ending a home's product from elsewhere, and forgetting its data."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from controlplane.local import processes
from controlplane.local.up import LOCK, MARKER, holder, is_home, locked, made

#: Longest that a whole product may take to stop, in seconds.
STOP_S = 120.0
#: Where the data of a home lies, in that home, while it is deleted.
FORGOTTEN = ".drydock-forgotten"


def down(home: Path, say: Callable[[str], None]) -> bool:
    """Stop the product of this home, or what a killed run has left. False if it did not end."""
    running = holder(home)
    if running and not _stop(int(running["pid"]), str(running["url"]), say):
        return False
    if is_home(home):
        with _alone(home):
            swept = processes.sweep(home)
    else:  # somebody has deleted it under what it runs
        swept = processes.stop_marked(home)
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


def forget(home: Path) -> list[str]:
    """Delete what `up` has made in a home that does not run, and the home if nothing else is there;
    the names of what else is, and stays.

    Cut short, it leaves no home that has its database without its keys.
    """
    with _alone(home):
        (home / MARKER).touch()  # by which a later call finds what one that is cut short has left
        doomed = home / FORGOTTEN
        if doomed.exists():  # an earlier call was cut short
            shutil.rmtree(doomed)
        doomed.mkdir()
        for path in made(home):
            path.rename(doomed / path.name)
        shutil.rmtree(doomed)
        (home / MARKER).unlink()
        (home / LOCK).unlink()
        left = sorted(path.name for path in home.iterdir())
        with suppress(OSError):  # it is not empty, a mount point, or in a folder of others
            home.rmdir()
    return left


def forget_earlier(home: Path) -> None:
    """Delete what a `reset` of an earlier version, which moved a home away, was cut short over."""
    moved = home.with_name(f"{home.name}.forgotten")
    if any((moved / name).exists() for name in (MARKER, LOCK, "secret-key")):
        shutil.rmtree(moved)
