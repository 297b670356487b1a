"""The coordinator's process: the real Coordinator behind simulated connections, clock and disk.

Mirrors server.py: `serve` for each connection, and a tick now and then.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.replica.connection import Peer
from runtime.replica.coordinator import Asked, Coordinator
from runtime.replica.record import Record, StaleEpoch
from tests.runtime.simulation.clock import Process
from tests.runtime.simulation.network import END, Connection

if TYPE_CHECKING:
    from tests.runtime.simulation.fleet import Fleet
    from tests.runtime.simulation.replica import Replica

TICKS_S = (0.14, 0.2)
WAIT_S = 0.05  # between two looks whether a newcomer's place is free


class Killed(BaseException):
    """The process dies in the middle of what it does."""


class Disk:
    """RecordFile's interface in memory; full at times, and its writer may die around a write."""

    path = Path("record")

    def __init__(self, job: str, on_advance: Callable[[Record], None]) -> None:
        self.full = False
        self.dies = ""  # "before" or "after" the next write
        self._job = job
        self._on_advance = on_advance
        self._text = ""

    def read(self) -> Record:
        if not self._text:
            return Record(job=self._job)
        raw = json.loads(self._text)
        by_number: dict[str, Any] = {
            name: {int(replica): of for replica, of in raw.pop(name).items()}
            for name in ("members", "holders")
        }
        return Record(**raw, **by_number)

    def advance(self, expected_epoch: int, new: Record) -> None:
        found = self.read().epoch
        if found != expected_epoch or new.epoch <= expected_epoch:
            raise StaleEpoch(f"the record is at epoch {found}, not {expected_epoch}")
        if self.full:
            raise OSError("no space left on device")
        dies, self.dies = self.dies, ""
        if dies == "before":
            raise Killed
        self._text = json.dumps(asdict(new))
        self._on_advance(new)
        if dies == "after":
            raise Killed

    def draft(self, _record: Record) -> None:
        if self.full:
            raise OSError("no space left on device")

    def lose(self) -> None:
        self._text = ""


class Keeper(Process):
    """One start of the coordinator."""

    def __init__(self, fleet: Fleet, *, any_claim: bool = False) -> None:
        super().__init__(fleet.clock, "coordinator")
        self.fleet = fleet
        self.process: Process = self  # network.Server
        self.coordinator = Coordinator(
            fleet.disk,  # type: ignore[arg-type]  # it has what is used of RecordFile
            "t",
            fleet.world,
            fleet.min_replicas,
            lease_s=fleet.lease_s,
            any_claim=any_claim,
            clock=fleet.clock.monotonic,
        )
        self.clock.note("coordinator starts at epoch %s", self.coordinator.record.epoch)
        fleet.network.server = self
        self.after(0.0, self, self._tick)

    def peer(self, replica: Replica) -> Peer | None:
        """Its connection, if we count one."""
        peers = self.coordinator.peers.values()
        return next((peer for peer in peers if peer.placement == replica.name), None)

    def accept(self, connection: Connection) -> None:
        served = _Served(self, connection)
        connection.on_server = served.hear

    def hear_exit(self, replica: Replica) -> None:
        """The node agent's word."""
        exited = {"op": "exit", "replica": replica.number, "placement": replica.name}
        self.coordinator.answer(exited)

    def failed(self, error: BaseException) -> None:
        if not isinstance(error, Killed | SystemExit):
            raise error
        self.fleet.end(self, silently=False)

    def _tick(self) -> None:
        self.coordinator.tick()
        waits = self.coordinator.gathered if self.coordinator.alive else {}
        assert not waits, "it remembers who came while nobody trained, and somebody trains"
        self.after(self.clock.random.uniform(*TICKS_S), self, self._tick)


class _Served:
    """server.serve(), one message after another."""

    def __init__(self, keeper: Keeper, connection: Connection) -> None:
        self.keeper, self.connection = keeper, connection
        self.peer: Peer | None = None
        self.over = False
        self._first: dict[str, Any] | None = None  # said by one whose place another has
        self._unheard: list[bytes] = []  # that it said since
        self._asked: Asked | None = None

    def hear(self, data: bytes) -> None:
        if self.over:
            return
        if data == END:
            self._end()
        elif self._first is not None:
            self._unheard.append(data)
        elif self.peer is None:
            self._first = json.loads(data)
            self._admit(self._first)
        elif not self.keeper.coordinator.hear(self.peer, json.loads(data)):
            self._end()

    def _admit(self, first: dict[str, Any]) -> None:
        if self.over:
            return
        coordinator = self.keeper.coordinator
        found = coordinator.place_of(first, self._asked)
        if not isinstance(found, str):
            self._asked = found
            self.keeper.after(WAIT_S, self.keeper, lambda: self._admit(first))
            return
        if found:
            self.write(json.dumps({"ok": False, "error": found}).encode())
            self._end()
            return
        self.peer = coordinator.join(first, self)  # type: ignore[arg-type]
        self._first, unheard = None, self._unheard
        for data in unheard:
            self.hear(data)

    def _end(self) -> None:
        self.over = True
        if self.peer is not None:
            self.keeper.coordinator.gone(self.peer, "reset")
        self.connection.close_server()

    # --- the writer that a Peer is given --------------------------------------------------------

    def write(self, data: bytes) -> None:
        self.connection.down.send(data)

    def is_closing(self) -> bool:
        return self.over

    def close(self) -> None:
        self.over = True
        self.connection.close_server()
