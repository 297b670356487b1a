"""Inside each rank: writes down what it passes through, strikes when ordered, ends the run.

Named to the rank through DRYDOCK_OBSERVER. It talks to the runner through files alone, so that a
rank whose connections are broken is still told and heard.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.client import ENV_PLACEMENT, ENV_RANK
from runtime.replica.observing import Observer, Phase
from runtime.torture.kinds import ANY, KINDS, Order

if TYPE_CHECKING:
    from runtime.replica.state import TrainingState
    from runtime.replica.telling import Committed

#: The folder that the runner and its ranks share.
ENV_FOLDER = "DRYDOCK_TORTURE"
ENV_PACE = "DRYDOCK_TORTURE_PACE"  # seconds


def from_environment() -> Observer:
    """What DRYDOCK_OBSERVER names."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the runner asks, should we hang
    return Torturer(
        Path(os.environ[ENV_FOLDER]),
        os.environ[ENV_PLACEMENT],
        int(os.environ[ENV_RANK]),
        float(os.environ[ENV_PACE]),
    )


class Torturer(Observer):
    """The eyes and the hand of the runner in one rank.

    The first rank tells what its replica passes through; the others only what is theirs alone.
    """

    def __init__(self, folder: Path, placement: str, rank: int, pace_s: float) -> None:
        self.rank = rank
        self.pace_s = pace_s
        self.order_file = order_file(folder, placement)
        self.end_file = end_file(folder)
        self._end: int | None = None
        self._events = os.open(
            events_file(folder, placement), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600
        )

    def at(self, phase: Phase, step: int) -> None:
        if phase in ("regroup", "sync"):
            self._tell("phase", phase=phase, step=step)
        if phase == "forward" and self.pace_s:
            time.sleep(self.pace_s)
        order = self._order()
        if order and order.phase in (phase, ANY) and order.rank == self.rank:
            self.order_file.unlink()
            self._obey(order, step)

    def committed(self, step: Committed) -> None:
        self._tell("commit", **vars(step))
        if self.rank:
            return
        if self._end is None and self.end_file.exists():
            self._end = int(self.end_file.read_text())
        if self._end is not None and step.step >= self._end - 2:
            # As a launcher would: the wish travels with the next step, after which all stop.
            os.kill(os.getpid(), signal.SIGTERM)

    def granted(self, message: dict[str, Any]) -> None:
        members = {str(m["replica"]): m["placement"] for m in message["members"]}
        self._tell("granted", epoch=message["epoch"], members=members)

    def lost(self, message: dict[str, Any]) -> None:
        self._tell("lost", replica=message["replica"], how=message["how"])

    def ended(self, state: TrainingState) -> None:
        if self.rank:
            self._tell("part", rank=self.rank, digest=state.digest())
            return
        self._tell(
            "ended",
            step=state.committed,
            digest=state.digest(),
            shards=state.batches.shards,
            shard_size=state.batches.shard_size,
            ledger=[asdict(entry) for entry in state.ledger.since(-1)],
        )

    def _order(self) -> Order | None:
        """What is ordered, if anything is; another rank may take it away at any time."""
        try:
            return Order(**json.loads(self.order_file.read_text()))
        except FileNotFoundError:
            return None

    def _obey(self, order: Order, step: int) -> None:
        def strike() -> None:
            self._tell("struck", fault=order.fault, step=step)
            KINDS[order.kind].strike(order)

        if order.delay_s:
            threading.Timer(order.delay_s, strike).start()
        else:
            strike()

    def _tell(self, what: str, **data: Any) -> None:
        if self.rank and what not in ("part", "struck"):
            return
        line = json.dumps({"what": what, "at": time.monotonic(), "data": data})
        os.write(self._events, line.encode() + b"\n")  # whole, even if we die at once


def order_file(folder: Path, placement: str) -> Path:
    return folder / f"order.{placement}"


def events_file(folder: Path, placement: str) -> Path:
    return folder / f"events.{placement}"


def end_file(folder: Path) -> Path:
    """Holds the number of steps of the run, once it is known."""
    return folder / "end"
