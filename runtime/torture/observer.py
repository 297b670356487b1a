"""Inside each rank: writes down what it passes through, strikes when ordered, ends the run.

Named to the rank through DRYDOCK_OBSERVER.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.client import CheckpointSaved, Sender, Trouble
from runtime.replica.observing import Observer, Phase
from runtime.torture import injector
from runtime.torture.injector import BETWEEN, Injector, around
from runtime.torture.kinds import COPY, LOAD, RECALL

if TYPE_CHECKING:
    from runtime.checkpoint.tiers import TierName
    from runtime.job import Job
    from runtime.replica.rank import Rank
    from runtime.replica.reporting import Committed
    from runtime.replica.state import TrainingState

ENV_PACE = "DRYDOCK_TORTURE_PACE"  # seconds
#: What a newcomer passes through for each step that its peers made since it began with theirs.
REPLAYED = ("apply", "optimizer")
ENV_SAVES = "DRYDOCK_TORTURE_SAVES"  # seconds between two saves at most; 0: as the script has it


def from_environment() -> Observer:
    """What DRYDOCK_OBSERVER names."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the runner asks, should we hang
    ours = injector.from_environment()
    watch_sums(ours)
    watch_checkpoints(ours)
    if every_s := float(os.environ[ENV_SAVES]):
        save_every(every_s)
    return Torturer(ours, float(os.environ[ENV_PACE]))


class Torturer(Observer):
    """The eyes of the runner in one rank.

    The first rank tells what its replica passes through; the others only what is theirs alone.
    """

    def __init__(self, injector: Injector, pace_s: float) -> None:
        self.injector = injector
        self.pace_s = pace_s
        self.end_file = end_file(injector.folder)
        self._end: int | None = None
        self._job: Job | None = None

    def joined(self, job: Job) -> None:
        self._job = job

    def at(self, phase: Phase, step: int) -> None:
        """Come to a phase of the training, and strike if that is ordered.

        A rank that is being let in stays in `sync`, whatever it replays. At `forward` the rank
        sleeps `pace_s` seconds. The phases `regroup` and `sync` are told to the runner.
        """
        if not (phase in REPLAYED and self._is_entering()):
            self.injector.enter(phase)
        if phase in ("regroup", "sync"):
            self._tell("phase", phase=phase, step=step)
        if phase == "forward" and self.pace_s:
            time.sleep(self.pace_s)
        self.injector.at(phase, step)

    def committed(self, step: Committed) -> None:
        """Tell the runner of a committed step, and end the training at the run's last step.

        The wish to stop travels with the next step, so it is made once the last step but one is
        committed. Only rank 0 tells and wishes.
        """
        if not self._is_entering():
            self.injector.enter(BETWEEN)
        self._tell("commit", **vars(step))
        if self.injector.rank:
            return
        if self._end is None and self.end_file.exists():
            self._end = int(self.end_file.read_text())
        if self._end is not None and self._job is not None and step.step >= self._end - 2:
            self._job.stop.set()  # the wish travels with the next step, after which all stop

    def granted(self, message: dict[str, Any]) -> None:
        self.injector.enter(BETWEEN)
        members = {str(m["replica"]): m["placement"] for m in message["members"]}
        self._tell("granted", epoch=message["epoch"], members=members)

    def lost(self, message: dict[str, Any]) -> None:
        whose, how = message["placement"], message["how"]
        self._tell("lost", replica=message["replica"], whose=whose, how=how)

    def ended(self, state: TrainingState) -> None:
        """Tell the runner the digest of the state at the end.

        Rank 0 tells its step, batch and ledger too; each other rank tells the digest of its part.
        """
        if self.injector.rank:
            self.injector.tell("part", rank=self.injector.rank, digest=state.digest())
            return
        self._tell(
            "ended",
            step=state.committed,
            digest=state.digest(),
            shards=state.batches.shards,
            shard_size=state.batches.shard_size,
            ledger=[asdict(entry) for entry in state.ledger.since()],
        )

    def _is_entering(self) -> bool:
        """A newcomer takes the state over until it is let in, whatever it replays meanwhile."""
        return self.injector.phase == "sync"

    def _tell(self, what: str, **data: Any) -> None:
        if not self.injector.rank:
            self.injector.tell(what, **data)


def watch_sums(injector: Injector) -> None:
    """Have the injector know whether the sum is under way that the training waits for.

    One on cards is taken to be: only the thread that began it may ask.
    """
    from runtime.replica.gloo import Gloo  # with torch, which a rank has by now

    def run(inner: Callable[..., None], gloo: Gloo, start: Callable[..., Any], *rest: Any) -> None:
        def begin(group: Any) -> Any:
            work = start(group)
            injector.under_way = lambda: not work.is_completed()
            return work

        try:
            inner(gloo, begin, *rest)
        finally:  # its group is freed with the last that knows the sum
            injector.under_way = lambda: False

    around(Gloo, "_run", run)


def watch_checkpoints(injector: Injector) -> None:
    """Pass on what an engineer and the control plane are told of checkpoints, and come to the
    phases of a rank that no observer is told of."""
    from runtime.checkpoint import Checkpointer  # with torch, which a rank has by now
    from runtime.replica import rank as ranks
    from runtime.replica.all_ranks import AllRanks

    def tell(inner: Callable[..., None], sender: Sender, message: Any) -> None:
        if isinstance(message, Trouble):
            injector.tell("trouble", kind=message.kind, subject=message.subject, text=message.text)
        elif isinstance(message, CheckpointSaved):
            injector.tell("saved", step=message.step, tier=message.tier, seconds=message.seconds)
        inner(sender, message)

    def save(inner: Callable[..., Any], *given: Any, **named: Any) -> Any:
        copying = inner(*given, **named)
        if copying is not None:  # it goes on beside the training from now
            injector.at(COPY, copying.step)
        return copying

    def read(inner: Callable[..., Any], rank: Rank, *, tier: TierName, **order: Any) -> Any:
        injector.at(RECALL if tier == "peer" else LOAD)
        return inner(rank, tier=tier, **order)

    def load(inner: Callable[..., None], together: AllRanks, *given: Any) -> None:
        began = time.monotonic()
        inner(together, *given)
        injector.tell("loaded", step=together.committed, seconds=time.monotonic() - began)

    around(Sender, "tell", tell)
    around(Checkpointer, "save", save)
    around(ranks.Rank, "read", read)
    around(AllRanks, "load", load)


def save_every(seconds: float) -> None:
    """To each tier, unless the script does so more often: what is damaged must be there."""
    from runtime.checkpoint.interval import Pace

    theirs = Pace.every_s
    setattr(Pace, "every_s", property(lambda pace: min(seconds, theirs.__get__(pace))))  # noqa: B010 - mypy knows it as read-only


def end_file(folder: Path) -> Path:
    """Holds the number of steps of the run, once it is known."""
    return folder / "end"
