"""What may take long stands back behind what trains, where both want a processor."""

from __future__ import annotations

import contextlib
import os
import threading

#: Added to the niceness of the training, for threads and for the writer's process; 19 is the most
#: that there is. Of a processor that both want they have a tenth. Not all 19: where data loaders
#: keep all processors busy such a thread would have none for seconds, no newcomer would ever be
#: served, and whoever hands it the interpreter's lock would stand still for as long.
NICE = 10


def lower_priority() -> None:
    """From now on this thread stands back behind the main one; not to be taken back.

    On Linux each thread has a priority of its own (setpriority(2), "C library/kernel differences").
    """
    with contextlib.suppress(OSError):
        training = os.getpriority(os.PRIO_PROCESS, os.getpid())
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), training + NICE)
