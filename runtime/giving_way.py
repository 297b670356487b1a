"""What may take long does its work in what those that train leave of the processors."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
from pathlib import Path

log = logging.getLogger("drydock.runtime")

LEAST = 19  # of the priorities that a user may give
#: Of a process over that of who starts it: where both want the same core it gets a tenth of it.
BEHIND = 10
#: Whoever is not root may rank sessions ten times a second, all of the machine together.
AGAIN_S, GIVEN_UP_S = 0.1, 30.0


def give_way() -> None:
    """From now on this thread runs where nothing else wants to; not to be taken back.

    On Linux each thread has a priority of its own (setpriority(2), "C library/kernel differences").
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST)


def put_behind(process: int) -> None:
    """Let a process that was just started give way to this one, from its first import on."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process, os.getpriority(os.PRIO_PROCESS, 0) + BEHIND)
    with contextlib.suppress(OSError):  # it sees to it itself
        _rank_session(process)


def stay_behind() -> threading.Thread:
    """Let the session of this process give way too, if it leads one, as soon as that can be had.
    Returns the thread that sees to it, which ends then.

    A process's own priority is not enough: unless they are in control groups, Linux shares the
    processors out by session first, and each gets the same (sched(7), "The autogroup feature").
    """

    def see_to_it() -> None:
        until = time.monotonic() + GIVEN_UP_S
        pause = threading.Event()
        while time.monotonic() < until:
            try:
                _rank_session(os.getpid())
            except BlockingIOError:
                pause.wait(AGAIN_S * (1 + random.random()))  # noqa: S311 - all try at once else
            except OSError:  # this kernel knows none, or lets nobody rank them
                return
            else:
                return
        log.warning("session_not_ranked tries_s=%s", GIVEN_UP_S)

    thread = threading.Thread(target=see_to_it, name="drydock-behind", daemon=True)
    thread.start()
    return thread


def _rank_session(process: int) -> None:
    """Raises OSError; BlockingIOError if that was done too often."""
    if os.getsid(process) == process:  # not the session that it shares with others
        Path(f"/proc/{process}/autogroup").write_text(str(BEHIND))
