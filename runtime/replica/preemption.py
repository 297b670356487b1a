"""Between a SIGTERM and the kill that follows it: what was trained is durable in time.

A job that is told to stop saves at its next edge. Where none comes soon enough (the script
evaluates, a step takes long, peers are gone), the state of the last edge is saved beside whatever
the training thread does.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import threading
import time
from collections.abc import Callable, Collection, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

from runtime.forking import is_taken, leave_signals, write_signals

if TYPE_CHECKING:
    from runtime.checkpoint import Checkpointer
    from runtime.checkpoint.tiers import TierName

log = logging.getLogger("drydock.replica")

GRACE_S = 30.0  # from SIGTERM to SIGKILL: what Kubernetes and Slurm give unless told otherwise
SAFETY = 2.0  # a save may take so many times as long as usual
UNMEASURED_S = 5.0  # and is thought to take so long before one was measured
LOOK_S = 86_400.0  # longer than this no call may be told to wait
BEGIN_S = 1.0  # until a copy is with its writers

Name = TypeVar("Name", bound=str)


def durable_in(usual_s: Mapping[Name, float | None], left_s: float) -> set[Name]:
    """Those of the tiers that will be durable within so many seconds: the sure ones, and those that
    only take no longer than usual, also if all go through one disk or wire. The quickest alone if
    there is none."""
    in_turn = in_turn_s(usual_s)
    sure = {one for one, usual in usual_s.items() if needed_s(usual) <= left_s}
    likely = {one for one, end in in_turn.items() if end <= left_s}
    return sure | likely or {*[*in_turn][:1]}


def in_time(
    tiers: Collection[Name], usual_s: Mapping[Name, float | None], left_s: float
) -> set[Name]:
    """To which of these tiers a last save goes: not to one that will not be durable and would take
    from the others the disk or wire that they share. `usual_s`: of those that are known to be well;
    `left_s` is endless where no kill was announced."""
    if math.isinf(left_s):
        return {*tiers}
    return {*tiers} - (usual_s.keys() - durable_in(usual_s, left_s))


def usual_s_in(saver: Checkpointer, tiers: Collection[TierName]) -> dict[TierName, float | None]:
    """How long a save usually takes in those of these tiers that neither fail nor hang now; in all
    of them, if none is well."""
    unwell = saver.dispatcher.unwell()
    usual_s = {one: saver.tiers[one].pace.alone_s for one in tiers}
    well = {
        one: seconds
        for one, seconds in usual_s.items()
        if one not in unwell and not hangs(saver.dispatcher.under_way_s(one), seconds)
    }
    return well or usual_s


def needed_s(usual_s: float | None) -> float:
    """How long a save takes at most, that usually takes so long."""
    return SAFETY * (UNMEASURED_S if usual_s is None else usual_s)


def in_turn_s(usual_s: Mapping[Name, float | None]) -> dict[Name, float]:
    """When each tier is durable, if each takes as long as usual and begins after the quicker ones;
    the quickest first."""
    known_s = {one: UNMEASURED_S if usual is None else usual for one, usual in usual_s.items()}
    ordered = sorted(known_s, key=known_s.__getitem__)
    return dict(zip(ordered, accumulate(known_s[one] for one in ordered), strict=True))


def hangs(under_way_s: float, usual_s: float | None) -> bool:
    """Whether a save, which is read back too, has been under way for far too long."""
    return under_way_s > BEGIN_S + 2 * needed_s(usual_s)


def longest_s(usual_s: Mapping[Name, float | None], grace_s: float) -> float:
    """How long before the kill a save begins, so that all tiers are durable in time that can be; at
    once if none is sure to be."""
    needed = [needed_s(usual) for usual in usual_s.values()]
    sure = [seconds for seconds in needed if seconds + BEGIN_S <= grace_s]
    likely = [end for end in in_turn_s(usual_s).values() if end + BEGIN_S <= grace_s]
    return BEGIN_S + (max(sure + likely) if sure else min(needed))


class Preemption:
    """Armed by `notice`, which a signal's handler may call in the middle of anything."""

    def __init__(
        self, grace_s: float, needs_s: Callable[[], float], save: Callable[[], None]
    ) -> None:
        """`needs_s`: how long a save takes at most; `save` saves what the last edge left, on a
        thread of its own, unless an edge came before."""
        self.grace_s = grace_s  # from the notice to the kill
        self._needs_s = needs_s
        self._save = save
        self._deadline: float | None = None  # monotonic
        self._reached = threading.Event()
        self._heard: dict[int, Callable[[], None]] = {}
        self._told, self._tell = os.pipe()  # never closed: a handler may be about to write
        os.set_blocking(self._tell, False)
        threading.Thread(target=self._run, name="drydock-preempted", daemon=True).start()

    def listen(self, number: int, heard: Callable[[], None]) -> None:
        """Have `heard` called as soon as this signal comes, which `take_signal` handles too: a
        handler waits for the main thread, and that may be in a library's call for longer than is
        left. On a thread of ours, and not off the main thread."""
        self._heard[number] = heard
        write_signals(self._tell)

    def notice(self, grace_s: float | None = None) -> None:
        """The process is killed `grace_s` from now; as long as usual if it is not said. Of several
        notices the one that leaves least time counts."""
        grace_s = self.grace_s if grace_s is None else grace_s
        deadline = time.monotonic() + grace_s
        if self._deadline is None or deadline < self._deadline:
            self.grace_s, self._deadline = grace_s, deadline
            self._wake()

    def edge(self) -> None:
        """The last save has begun, or none is wanted any more."""
        self._reached.set()
        self._wake()

    def is_over(self) -> bool:
        """Whether the last save has begun, or none is wanted any more."""
        return self._reached.is_set()

    def left_s(self) -> float:
        """Seconds until the kill; endless if none was announced."""
        end = self._deadline
        return math.inf if end is None else max(0.0, end - time.monotonic())

    def close(self) -> None:
        leave_signals(self._tell)
        self.edge()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it has enough to wake up for
            os.write(self._tell, b"\0")

    def _run(self) -> None:
        told = select.poll()
        told.register(self._told, select.POLLIN)
        while (wait_s := self._wait_s()) > 0:
            if told.poll(math.ceil(1000 * min(wait_s, LOOK_S))):
                # A child that was forked has this pipe too.
                for number in os.read(self._told, select.PIPE_BUF):
                    if number in self._heard and is_taken(number):
                        self._heard[number]()
            if self._reached.is_set():
                return
        if self._reached.is_set():
            return
        log.warning("preempted left_s=%.1f", self.left_s())
        try:
            self._save()
        except Exception:  # the edge may still come
            log.exception("preemption_save_failed")

    def _wait_s(self) -> float:
        """Until a save has to begin that is durable in time."""
        if self._deadline is None:
            return math.inf
        return max(0.0, self.left_s() - self._needs_s())
