"""How a job that restarts as a whole saves before it is killed.

All ranks save to the same tiers, and at the end of a step. If none ends in time, they save beside
the loop once it says that nothing changes what is saved.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from runtime.checkpoint import Checkpointer
from runtime.checkpoint.saver import FINISH_S
from runtime.checkpoint.tiers import TIERS, TierName
from runtime.job import Job
from runtime.replica.preemption import (
    UNMEASURED_S,
    Preemption,
    durable_in,
    in_time,
    longest_s,
    usual_s_in,
)
from runtime.snapshot import Copying, Due

NEVER_MS = 1 << 50  # no kill was announced


@dataclass(frozen=True)
class AtRest:
    """What may be saved at any moment of a while."""

    step: int  # the last one that is in it
    state: Callable[[], tuple[Any, Due]]  # and until when each tensor stays as it is
    computed_on: torch.cuda.Stream | None = None  # where a card made it what it is


#: Begins a copy of that for these tiers, of which some may have it already.
Save = Callable[[AtRest, Collection[TierName]], Copying | None]


class FinalSave:
    """Of one rank."""

    def __init__(self, job: Job, saver: Checkpointer, save: Save) -> None:
        self._job = job
        self._saver = saver
        self._save = save
        #: to these tiers the last save does not go: they would not have it in time
        self.too_late: set[TierName] = set()
        self._usual_s: dict[TierName, float] = {}  # of a save, on the slowest rank
        self._preemption: Preemption | None = None  # between begin and close
        self._rest: AtRest | None = None
        self._copying: Copying | None = None  # that was begun aside
        self._changed = threading.Condition()  # held by whoever begins a copy aside

    def begin(self) -> None:
        """From here on it is heard that we are to end."""
        preemption = Preemption(
            self._job.grace_s,
            lambda: longest_s(self._takes_s(), preemption.grace_s),
            lambda: self._save_aside(preemption),
        )
        self._preemption = preemption
        self._job.told.heard = lambda: preemption.notice(self._job.kill_in_s())
        if self._job.told.is_set():
            preemption.notice(self._job.left_s())
        if threading.current_thread() is threading.main_thread():
            preemption.listen(signal.SIGTERM, self._job.told.set)

    def close(self) -> None:
        """Nothing is saved aside any more; what is being copied is copied."""
        if self._preemption is None:
            return
        self._job.told.heard = _nothing
        self._preemption.close()
        with self._changed:
            self._changed.notify_all()
        self._await_copy()

    @contextlib.contextmanager
    def at_rest(self, what: AtRest) -> Iterator[None]:
        """Nothing in here changes that, until it is left."""
        with self._changed:
            before, self._rest = self._rest, what
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._rest = before
            self._await_copy()

    # --- to which tiers -------------------------------------------------------------------------

    def times(self, tiers: Collection[TierName]) -> list[int]:
        """Of each rank they make known to all what `hear` takes the highest of. In ms how long a
        save takes, of each of TIERS, or -1; and below zero in how long this rank is killed."""
        usual_s = usual_s_in(self._saver, tiers)
        takes = (UNMEASURED_S if one is None else one for one in usual_s.values())
        known = dict(zip(usual_s, takes, strict=True))
        in_ms = [round(1000 * known[name]) if name in known else -1 for name in TIERS]
        # Of several notices the one counts that leaves the least time.
        left_s = (self._preemption or self._job).left_s()
        return [*in_ms, -NEVER_MS if math.isinf(left_s) else -round(1000 * left_s)]

    def hear(self, tiers: Collection[TierName], told: Sequence[int]) -> None:
        """`told`: of the `times` of all ranks the highest."""
        *takes, left = told
        usual_s = {name: ms / 1000 for name, ms in zip(TIERS, takes, strict=True) if ms >= 0}
        self._usual_s = {name: seconds for name, seconds in usual_s.items() if name in tiers}
        left_s = math.inf if -left >= NEVER_MS else -left / 1000
        self.too_late = {*tiers} - in_time(tiers, self._usual_s, left_s)

    # --- aside ----------------------------------------------------------------------------------

    def _takes_s(self) -> Mapping[TierName, float | None]:
        """As all ranks know it, if they have met at an edge: each is to choose the same tiers."""
        return self._usual_s or usual_s_in(self._saver, self._saver.tiers)

    def _save_aside(self, preemption: Preemption) -> None:
        """On a thread of its own, once there is no more time to wait for an edge."""
        self._saver.copy_buffers.await_free(
            FINISH_S
        )  # before the lock: the loop may go on meanwhile
        with self._changed:
            self._changed.wait_for(lambda: self._rest is not None or preemption.is_over())
            if self._rest is not None and not preemption.is_over():
                tiers = durable_in(self._takes_s(), preemption.left_s())
                self._copying = self._save(self._rest, tiers)

    def _await_copy(self) -> None:
        """Before anything changes what it copies."""
        with self._changed:
            copying, self._copying = self._copying, None
        if copying is not None:
            copying.wait()


def _nothing() -> None:
    """Nobody is there to hear it."""
