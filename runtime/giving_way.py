"""Threads that may take long do their work in what those that train leave of the processors."""

from __future__ import annotations

import contextlib
import os
import threading

LEAST = 19  # of the priorities that a user may give


def give_way() -> None:
    """From now on this thread runs where nothing else wants to; not to be taken back.

    On Linux each thread has a priority of its own (setpriority(2), "C library/kernel differences").
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST)
