"""Between a SIGTERM and the kill that follows it: what was trained is durable in time.

A job that is told to stop saves at its next edge. Where none comes soon enough (the script
evaluates, a step takes long, peers are gone), the state of the last edge is saved beside whatever
the training thread does.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

log = logging.getLogger("drydock.replica")

GRACE_S = 30.0  # from SIGTERM to SIGKILL: what Kubernetes and Slurm give unless told otherwise
SAFETY = 2.0  # a save may take so many times as long as usual
UNMEASURED_S = 5.0  # and is thought to take so long before one was measured

Name = TypeVar("Name", bound=str)


def durable_in(
    tiers: Sequence[Name], usual_s: Mapping[Name, float | None], left_s: float
) -> set[Name]:
    """Those of the tiers, of which the quickest comes first, that will be durable within so many
    seconds; the quickest alone if none is sure to be."""
    takes_s = {one: needed_s(usual_s[one]) for one in tiers}
    sure = {one for one in tiers if takes_s[one] <= left_s}
    return sure or {*sorted(tiers, key=takes_s.__getitem__)[:1]}


def needed_s(usual_s: float | None) -> float:
    """How long a save takes at most, that usually takes so long."""
    return SAFETY * (UNMEASURED_S if usual_s is None else usual_s)


class Preemption:
    """Armed by `notice`, which a signal's handler may call in the middle of anything."""

    def __init__(
        self, grace_s: float, needs_s: Callable[[], float], save: Callable[[], None]
    ) -> None:
        """`needs_s`: how long a save takes at most; `save` saves what the last edge left, on a
        thread of its own, unless an edge came before."""
        self._grace_s = grace_s
        self._needs_s = needs_s
        self._save = save
        self._deadline: float | None = None  # monotonic
        self._reached = threading.Event()
        self._told, self._tell = os.pipe()
        threading.Thread(target=self._run, name="drydock-preempted", daemon=True).start()

    def notice(self) -> None:
        """The process is killed `grace_s` from now."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._grace_s
            os.write(self._tell, b"!")

    def edge(self) -> None:
        """The last save has begun, or none is wanted any more."""
        self._reached.set()

    def left_s(self) -> float | None:
        """Seconds until the kill; None if none was announced."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def close(self) -> None:
        self._reached.set()
        if self._deadline is None:
            self._deadline = 0.0
            os.write(self._tell, b"!")

    def _run(self) -> None:
        os.read(self._told, 1)
        os.close(self._told)
        left_s = self.left_s() or 0.0
        if self._reached.wait(max(0.0, left_s - self._needs_s())):
            return
        log.warning("preempted left_s=%.1f", self.left_s() or 0.0)
        try:
            self._save()
        except Exception:  # the edge may still come
            log.exception("preemption_save_failed")
