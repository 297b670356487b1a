"""`manage.py down` and `reset`: ending a home's product from elsewhere, and forgetting its data."""

from __future__ import annotations

import errno
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
#: What the system says of a mount point, or of a folder of an image's own, that is to be moved.
UNMOVABLE = (errno.EBUSY, errno.EXDEV)
#: Why something stays in a home that nobody but its owner may delete.
THEIRS = "not Drydock's"


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


def forget(home: Path) -> dict[str, str]:
    """Delete what `up` has made in a home that does not run, and the home if nothing else is there;
    the names of what stays, and why it does.

    Cut short, it leaves no home that has its database without its keys.
    """
    with _alone(home):
        (home / MARKER).touch()  # by which a later call finds what one that is cut short has left
        doomed = home / FORGOTTEN
        if doomed.exists():  # an earlier call was cut short
            _delete(doomed)
        doomed.mkdir(exist_ok=True)
        left = {}
        for path in made(home):
            try:
                path.rename(doomed / path.name)
            except OSError as error:
                if error.errno not in UNMOVABLE:
                    raise  # nothing that comes after it is touched
                left[path.name] = _delete(path)
        left[FORGOTTEN] = _delete(doomed)
        left = {name: why for name, why in left.items() if why}
        if not left:  # else it stays a home, in which `up` goes on and a later call tries again
            (home / MARKER).unlink()
        (home / LOCK).unlink()
        others = {path.name for path in home.iterdir()} - {MARKER, *left}
        with suppress(OSError):  # it is not empty, a mount point, or in a folder of others
            home.rmdir()
    return left | dict.fromkeys(sorted(others), THEIRS)


def _delete(path: Path) -> str:
    """Delete this, or else as much of what is in it as can be; why it stays, "" if it is gone."""
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        shutil.rmtree(path, ignore_errors=True)
        return error.strerror or str(error)
    return ""


def forget_earlier(home: Path) -> None:
    """Delete what a `reset` of an earlier version, which moved a home away, was cut short over."""
    moved = home.with_name(f"{home.name}.forgotten")
    if any((moved / name).exists() for name in (MARKER, LOCK, "secret-key")):
        shutil.rmtree(moved)
