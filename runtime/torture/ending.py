"""The run is told to end: by a signal, heard whatever Python was about when it came.

What a handler raises is dropped where Python runs a callback of its own (at a fork, at the end of
an object); so it is noted too, and raised again from where the run waits.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

_told: list[int] = []  # the signals that came


def listen() -> None:
    """From now on SIGTERM, SIGINT and SIGHUP, this one unless it is ignored as nohup has it, raise
    SystemExit."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _hear)


def heed() -> None:
    """Raises SystemExit if the run was told to end."""
    if _told:
        sys.exit(128 + _told[0])


def _hear(number: int, _frame: FrameType | None) -> None:
    _told.append(number)
    heed()
