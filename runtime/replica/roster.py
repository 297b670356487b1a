"""Who is there, who trains in the present epoch, and who of them is gone.

Standard library only. Keeps what the coordinator knows; grants nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from runtime.client import How
from runtime.replica.admission import Admission
from runtime.replica.claims import Claims
from runtime.replica.comparing import Comparison
from runtime.replica.connection import Peer
from runtime.replica.proving import Proofs
from runtime.replica.reach import Doubt
from runtime.replica.record import Record, RecordFile, StaleEpoch
from runtime.replica.rendezvous import Rendezvous
from runtime.replica.succession import Succession

log = logging.getLogger("drydock.coordinator")

TICK_S = 0.1  # how often the clock is looked at
PEER_SILENT_S = 2.0  # a member that answered nothing for so long is dead, if not said otherwise
LEASE_S = 10.0  # how long members may train without a word from the coordinator
FROZEN_S = 1.0  # who did not run for so long may have lost connections that are there again
#: All are asked for a sign of life twice in that time. If none of them gives one it is rather our
#: own network that fails than all of them.
CUT_OFF_S = 1.0


class Roster(ABC):
    """The peers by their numbers, and the record, which alone outlives this process."""

    def __init__(
        self,
        record_file: RecordFile,
        token: str,
        world: int,
        min_replicas: int,
        *,
        lease_s: float = LEASE_S,
        silent_s: float = PEER_SILENT_S,
        any_claim: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`silent_s`: for how long a member may answer nothing, or be away after our own restart,
        unless an epoch broke then.
        `any_claim`: a person decided that what any member tells of a lost record is true."""
        self.file = record_file
        self.folder_answers: Callable[[], bool] = lambda: True  # see `Keeper.answers`
        self.record = record_file.read()
        self.token = token
        #: how many a job that begins waits for; the ranks know it too, and so does the record
        self.world = max(world, self.record.grant.get("world", 0))
        self.min_replicas = min_replicas
        self.lease_s = lease_s
        self.silent_s = silent_s
        self.clock = clock
        self.peers: dict[int, Peer] = {}
        #: the members of the current epoch that are not known to be gone
        self.alive: dict[int, str] = dict(self.record.members)
        self.places = Succession(self.record)
        self.claims = Claims(any_claim=any_claim)
        self.admission = Admission()
        self.proofs = Proofs()
        self.comparison = Comparison()
        self.lost: list[dict[str, Any]] = []  # since the epoch was granted
        self.left: list[int] = []  # and which replicas left it alone, between two steps
        self.broken_at = 0.0  # Unix time when the current epoch was found broken; 0: it is whole
        self.rendezvous = Rendezvous()  # of the current epoch
        self.doubt = Doubt()  # whether its members reach each other
        self.unwritten = ("", 0.0)  # why the record was not written, and when that was last logged
        now = clock()
        self.started = now
        #: while nobody trains: when each replica, and each kind of standby, came first
        self.gathered: dict[int | str, float] = {}
        self.ordered: dict[int, float] = {}  # since when each order to get a state is carried out
        self.last_tick = self.last_ping = now
        self.last_word = now  # when anybody was last heard of
        self.excused = False  # members that are away were given time, and are not back
        self.woke = 0.0  # when we ran, or heard of anybody, again after we had not for long
        #: when a member of the current epoch was last heard of; and whether one of them surely
        #: trains in it no more, so that the others cannot either
        self.last_contact = now
        self.fenced = not self.record.members
        self.copies_from = now  # not sooner is anybody asked for a copy while nobody trains
        self.ended: set[str] = set()  # placements whose process has ended, by an agent's word
        self.stirred = asyncio.Event()  # something was heard, or time has passed

    @abstractmethod
    def settle(self) -> None:
        """Bring everyone one message further, if anything can be decided now."""

    def members(self) -> list[Peer]:
        found = [p for p in self.peers.values() if p.phase == "member" and p.replica in self.alive]
        return sorted(found, key=lambda p: p.replica)

    def newcomers(self, *phases: str) -> list[Peer]:
        """By their number; of these phases, if any is named."""
        known = phases or ("fresh", "loading", "syncing", "ready")
        found = [p for p in self.peers.values() if p.phase in known]
        return sorted(found, key=lambda p: p.replica)

    def gone(self, peer: Peer, how: How) -> None:
        """The peer's connection ended, or the peer is to be treated as if it had."""
        if self.peers.get(peer.replica) is peer:
            self.part_with(peer, how)
            self.settle()

    def part_with(self, peer: Peer, how: How) -> None:
        """Forget a peer whose connection ended; if it is a living member, it is lost too.

        A member whose connection was reset may return if we did not run, or were cut off, just
        before. `tick` loses it if it does not. Raises KeyError if no peer has its number.
        """
        del self.peers[peer.replica]
        peer.writer.close()
        self.admission.forget(peer.replica)
        self.proofs.interrupt()
        self.claims.forget(peer.replica)
        if peer.phase == "member" and self.alive.get(peer.replica) == peer.placement:
            if how == "reset" and (self.was_frozen() or self.is_cut_off()):
                log.warning("may_return replica=%s", peer.replica)  # tick() loses who does not
            else:
                self.lose(peer.replica, how)
        log.info("gone replica=%s placement=%s how=%s", peer.replica, peer.placement, how)

    def was_frozen(self) -> bool:
        """Whether we did not run, or were cut off, for long until just now: members may have
        connected anew, and the ends of their old connections say nothing."""
        now = self.clock()
        return now - self.last_tick > FROZEN_S or now - self.woke < FROZEN_S

    def is_cut_off(self) -> bool:
        """Whether nobody was heard for long: then nobody's silence says anything, and nobody waits
        for a place that another holds."""
        return self.clock() - self.last_word > CUT_OFF_S

    def note_word(self, peer: Peer | None = None, *, alive: bool = True) -> None:
        """Somebody was heard: a peer, or one that is none yet. `alive`: what a peer said is a sign
        of life.

        After a time in which nobody was, the others' words are on their way: a kernel sends them
        again after pauses that are as long as that time. But each is excused once, until it is
        heard itself, and for no longer than a member may train unheard.
        """
        now = self.clock()
        if (gap := now - self.last_word) > CUT_OFF_S:
            if self.alive and not self.excused:
                self.woke, self.excused = now, True
            pause = max(0.0, min(gap, self.last_contact + self.lease_s - now))
            for other in [p for p in self.peers.values() if not p.excused]:
                other.heard, other.excused = now + pause, True
        self.last_word = now
        if peer is not None:
            peer.spoke = now
            if alive:
                peer.heard, peer.excused = now, False
            self.excused = self.excused and not self.alive.keys() <= self.peers.keys()

    def lose(self, replica: int, how: How) -> None:
        """A member is gone, and its connection with it."""
        placement = self.alive[replica]
        peer = self.peers.get(replica)
        if peer is not None and peer.placement == placement:
            del self.peers[replica]
            peer.writer.close()
            self.admission.forget(replica)
        self.drop(replica, how)

    def drop(self, replica: int, how: How) -> None:
        """The epoch is broken, for this member trains in it no more."""
        placement = self.alive.pop(replica)
        entry = {"replica": replica, "placement": placement, "how": how, "at": time.time()}
        self.lost.append(entry)
        log.warning("lost replica=%s placement=%s how=%s", replica, placement, how)
        self.begin_newcomers_anew()
        for member in self.members():
            member.tell(op="lost", epoch=self.record.epoch, **entry)
        self.break_epoch()

    def begin_newcomers_anew(self) -> None:
        """If nobody is left whose state they could take."""
        for peer in [] if self.alive else self.newcomers():
            peer.begin()

    def break_epoch(self) -> None:
        if not self.broken_at:
            self.broken_at = time.time()
            for member in self.members():
                member.tell(op="broken", epoch=self.record.epoch)

    def keep(self, record: Record) -> None:
        """Make a record durable. Raises OSError; ends this process if another one wrote it too."""
        try:
            self.file.advance(self.record.epoch, record)
        except StaleEpoch as error:
            log.critical("stale_epoch error=%s", error)
            raise SystemExit(1) from error
        self.record = record
        self.unwritten = ("", 0.0)
