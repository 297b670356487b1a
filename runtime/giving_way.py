"""What may take long does its work in what those that train leave of the processors."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

LEAST = 19  # of the priorities that a user may give
#: Of a process over ours: where both want the same core it gets a tenth of it.
BEHIND = 10
#: Whoever is not root may rank sessions ten times a second, all of the machine together.
TRIES, TRY_S = 20, 0.1


def give_way() -> None:
    """From now on this thread runs where nothing else wants to; not to be taken back.

    On Linux each thread has a priority of its own (setpriority(2), "C library/kernel differences").
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST)


def put_behind(process: int) -> None:
    """Let a process that was just started in a session of its own give way to this one. May take
    two seconds.

    Its own priority is not enough: unless they are in control groups, Linux shares the processors
    out by session first, and each gets the same (sched(7), "The autogroup feature").
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process, os.getpriority(os.PRIO_PROCESS, 0) + BEHIND)
    session = Path(f"/proc/{process}/autogroup")
    pause = threading.Event()
    for _ in range(TRIES):
        try:
            if os.getsid(process) == process:
                session.write_text(str(BEHIND))
        except BlockingIOError:
            pause.wait(TRY_S)
        except OSError:  # it has ended, or this kernel knows none
            return
        else:
            return
