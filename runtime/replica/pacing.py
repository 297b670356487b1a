"""A cap on what this process sends newcomers, over all of its connections together.

A token bucket in terms of time: each piece is given the moment at which it may leave, so nobody
polls, and nobody waits while there is room. Standard library only.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

from runtime.client import ENV_RATE_CAP

#: Below this a newcomer that waits its turn would take its donor for dead.
LEAST = 10_000_000
#: What may leave at once after a pause: a chunk of a state.
BURST = 1 << 20
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


class Pace:
    """Lets so many bytes a second pass; who comes first goes first."""

    def __init__(
        self,
        bytes_per_s: float,
        burst: int,
        *,
        now: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        """`burst`: bytes that pass at once after a pause. `wait` is told for how many seconds."""
        self._rate = bytes_per_s
        self._lead_s = burst / bytes_per_s
        self._now = now
        self._closed = threading.Event()
        self._wait = self._closed.wait if wait is None else wait
        self._lock = threading.Lock()
        self._paid_until = now()  # what has passed is worth the time up to here

    def take(self, size: int) -> None:
        """Return once so many bytes may be sent."""
        with self._lock:
            now = self._now()
            self._paid_until = max(self._paid_until, now) + size / self._rate
            due = self._paid_until - self._lead_s
        if due > now:
            self._wait(due - now)

    def close(self) -> None:
        """Let all pass who wait."""
        self._closed.set()


def pace_of(bytes_per_s: int | None) -> Pace | None:
    """None stands for no cap."""
    return None if bytes_per_s is None else Pace(bytes_per_s, BURST)


def bytes_per_second(said: str) -> int | None:
    """What DRYDOCK_RATE_CAP says: a number with k, M or G; None for no cap.

    Raises RuntimeError for what is none, or too low to work.
    """
    if not said:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kMG]?)", said)
    if found is None:
        raise RuntimeError(
            f"{ENV_RATE_CAP} is {said!r}; give bytes per second, as 800M or 1.5G, or leave it empty"
        )
    rate = round(float(found[1]) * _UNITS[found[2]])
    if rate < LEAST:
        raise RuntimeError(
            f"{ENV_RATE_CAP} is {said}, {rate:,} bytes per second; give at least {LEAST:,}: with "
            "less, newcomers would take peers that keep them waiting for dead"
        )
    return rate
