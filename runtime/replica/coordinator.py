"""The one process that grants epochs: `python -m runtime.replica.coordinator`.

Standard library only. Members propose, this process decides, durably, before it tells anyone. It
must never stand on the path of a healthy step: its death costs no step.

One TCP connection per member, JSON lines. The first line carries the job's token. The verbs are
`join`, `ready`, `report`, `staged`, `caught_up`, `set`, `get`, `pong`, `again`, `goodbye` from
replicas, and `exit` and `status` from a node agent or a person.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable
from typing import Any

from runtime.replica.admission import Admission
from runtime.replica.claims import Claims
from runtime.replica.connection import Peer, introduce
from runtime.replica.listening import LEASE_S, TICK_S, options, run
from runtime.replica.places import Places
from runtime.replica.plan import Report, fixed_shares, take_over
from runtime.replica.record import Record, RecordFile, StaleEpoch
from runtime.replica.rendezvous import Rendezvous
from runtime.replica.shape import difference, misfit

log = logging.getLogger("drydock.coordinator")

PING_S = 0.5  # how often each peer is asked for a sign of life
PEER_SILENT_S = 2.0  # a member that answered nothing for so long is dead
NEWCOMER_SILENT_S = 20.0  # a newcomer may be busy importing or loading
ABSENT_S = 2.0  # after our own restart: how long a member of the record has to come back
ABSENT_BROKEN_S = 1.0  # the same where others wait for the next epoch: time to connect again
FROZEN_S = 1.0  # who did not run for so long may have lost connections that are there again
GATHER_S = 10.0  # a whole job that starts again: how long to wait for the rest of it
LEASE_MARGIN_S = 1.0  # for clocks that do not run alike
UNDECIDED_S = 10.0  # how long members that we do not know wait before a person is told


class Coordinator:
    """All decisions, driven by messages and by `tick`; only the record outlives it."""

    def __init__(
        self,
        record_file: RecordFile,
        token: str,
        world: int,
        min_replicas: int,
        *,
        lease_s: float = LEASE_S,
        any_claim: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`any_claim`: a person decided that what any member tells of a lost record is true."""
        self.file = record_file
        self.record = record_file.read()
        self.token = token
        self.world = world  # how many the first epoch waits for; the ranks know it too
        self.min_replicas = min_replicas
        self.lease_s = lease_s
        self.clock = clock
        self.peers: dict[int, Peer] = {}
        #: the members of the current epoch that are not known to be gone
        self.alive: dict[int, str] = dict(self.record.members)
        self.places = Places(self.record)
        self.claims = Claims(any_claim=any_claim)
        self.admission = Admission()
        self.lost: list[dict[str, Any]] = []  # since the epoch was granted
        self.broken_at = 0.0  # Unix time when the current epoch was found broken; 0: it is whole
        self.rendezvous = Rendezvous()  # of the current epoch
        now = clock()
        self.started = now
        self.first_newcomer = 0.0
        self.last_tick = self.last_ping = now
        self.woke = 0.0  # when we ran again after we had not for long
        #: when a member of the current epoch was last heard of; and whether one of them surely
        #: trains in it no more, so that the others cannot either
        self.last_contact = now
        self.fenced = not self.record.members
        self.ended: set[str] = set()  # placements whose process has ended, by an agent's word

    # --- connections ----------------------------------------------------------------------------

    def refusal(self, first: dict[str, Any]) -> str:
        """Why whoever says this first line is not listened to; "" if it is."""
        given = str(first.get("token", "")).encode()
        if not hmac.compare_digest(given, self.token.encode()):
            return "wrong token: give the job's DRYDOCK_TOKEN in the first line"
        if first.get("op") not in ("join", "exit", "status"):
            return f"unknown op {first.get('op')!r}: begin with join, exit or status"
        if first["op"] == "join":
            if first["job"] != self.record.job:
                return (
                    f"this replica's job is {first['job']}, the coordinator's is "
                    f"{self.record.job}: give each job a coordinator of its own"
                )
            holder = self.peers.get(int(first["replica"]))
            promoted = holder if holder is not None and holder.promoted else None
            if promoted and promoted.placement != first["placement"] and not first["standby"]:
                return (
                    f"{promoted.placement}, which stood by, has taken the place of replica "
                    f"{promoted.replica}: this process must end"
                )
            was_member = 0 < int(first["epoch"]) <= self.record.epoch
            taken = self.places.refusal(int(first["replica"]), str(first["placement"]), was_member)
            others = [p for p in self.peers.values() if p.replica != int(first["replica"])]
            known = [(p.shape, p.phase == "member") for p in others]
            return taken or misfit(first, self.world, known)
        return ""

    def hear(self, peer: Peer, message: dict[str, Any]) -> bool:
        """Act on one message; False if the peer speaks on a connection that counts no more."""
        verbs: dict[str, Callable[[Peer, dict[str, Any]], None]] = {
            "pong": self.on_pong,
            "ready": self.on_ready,
            "report": self.on_report,
            "staged": self.on_staged,
            "caught_up": self.on_caught_up,
            "again": self.on_again,
            "set": self.on_set,
            "get": self.on_get,
            "goodbye": self.on_goodbye,
        }
        if self.peers.get(peer.replica) is not peer:
            return False
        peer.heard = self.clock()
        if peer.phase == "member":
            self.last_contact = peer.heard
        verbs[message["op"]](peer, message)
        self.settle()
        return True

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["op"] == "exit":
            placement = str(message["placement"])
            self.ended.add(placement)
            if placement in self.record.members.values():
                self.fenced = True
            for replica in [n for n, name in self.alive.items() if name == placement]:
                self.lose(replica, "agent")
            self.settle()
            return {"ok": True}
        return {
            "ok": True,
            "job": self.record.job,
            "epoch": self.record.epoch,
            "members": sorted(self.alive),
            "step": max([self.record.step, *(p.step for p in self.peers.values())]),
            "peers": {p.replica: p.phase for p in self.peers.values()},
        }

    # --- what replicas say ----------------------------------------------------------------------

    def join(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> Peer:
        if message["standby"]:
            return self.stand_by(message, writer)
        replica, placement = int(message["replica"]), str(message["placement"])
        peer = Peer.of(message, writer, self.clock())
        if not self.record.epoch:
            self.world = max(self.world, int(message["world"]))
        self.supersede(replica, placement)
        previous = self.peers.get(replica)
        if previous is not None and previous.placement == placement:
            del self.peers[replica]  # the same process on a new connection: nobody is lost
            previous.writer.close()
            self.admission.interrupt()
        elif previous is not None:
            self.part_with(previous, "reset")
        told_epoch = int(message["epoch"])
        if told_epoch > self.record.epoch:
            peer.phase = "claiming"
            self.peers[replica] = peer
            self.claims.add(peer, told_epoch, message["members"], self.clock())
            self.settle()
            return peer
        self.claims.forget(replica)
        if self.alive.get(replica) == placement and self.returns(peer, told_epoch):
            self.peers[replica] = peer
        elif replica in self.alive:
            self.lose(replica, "reset")
        self.peers[replica] = peer
        if told_epoch and peer.phase != "member":
            peer.tell(op="evicted", epoch=self.record.epoch)
        log.info("joined replica=%s placement=%s as=%s", replica, placement, peer.phase)
        self.settle()
        return peer

    def stand_by(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> Peer:
        """It follows the members until there is a place for it; till then its number is below 0."""
        peer = Peer.of(message, writer, self.clock())
        peer.standby, peer.place = str(message["standby"]), peer.replica
        for other in [p for p in self.peers.values() if p.placement == peer.placement]:
            del self.peers[other.replica]  # the same process on a new connection
            other.writer.close()
            self.admission.interrupt()
        for number in [n for n, name in self.alive.items() if name == peer.placement]:
            if self.returns(peer, 0):
                peer.replica, peer.standby = number, ""
            else:
                self.lose(number, "reset")
        if peer.standby:
            self.dismiss_earlier(peer)
            peer.replica = min([0, *self.peers]) - 1
        self.peers[peer.replica] = peer
        log.info("stands_by placement=%s for=%s", peer.placement, peer.place)
        self.settle()
        return peer

    def returns(self, peer: Peer, told_epoch: int) -> bool:
        """Take a member of the present epoch back on a new connection; False if it cannot be."""
        if told_epoch != self.record.epoch and not self.record.grant:
            return False
        peer.phase = "member"
        self.last_contact = self.clock()
        if told_epoch != self.record.epoch:
            # We died between making the epoch durable and telling this member.
            peer.tell(**self.record.grant)
        if self.broken_at:
            for entry in self.lost:
                peer.tell(op="lost", epoch=self.record.epoch, **entry)
            peer.tell(op="broken", epoch=self.record.epoch)
        return True

    def dismiss_earlier(self, standby: Peer) -> None:
        """The newest start that is to take a place does; an older one is told to end."""
        for other in self.newcomers():
            if "migrate" == standby.standby == other.standby and other.place == standby.place:
                error = f"{standby.placement} stands by for replica {other.place} in its place"
                other.tell(op="refused", error=f"{error}: this process must end")
                self.gone(other, "reset")

    def seats(self, ready: list[Peer]) -> dict[int, Peer]:
        """Which number each of these newcomers enters with, if it may enter now."""
        found = {p.replica: p for p in ready if not p.standby}
        waiting = [p for p in ready if p.standby]
        staying = {member.replica for member in self.members()}
        alone = len(staying) == 1
        for peer in [p for p in waiting if p.standby == "migrate" and p.place not in found]:
            # From a living member at a planned edge only: what it holds of a step is not lost. One
            # of several stays, to hand on the last step.
            free = peer.place not in self.peers
            if free or (not self.broken_at and (alone or len(staying) > 1)):
                found[peer.place] = peer
                staying.discard(peer.place)
        numbers = range(self.record.grant.get("world", self.world))
        vacant = [n for n in numbers if n not in {*self.peers, *self.alive, *found}]
        spares = [p for p in waiting if p.standby == "spare"]
        return found | dict(zip(vacant, spares, strict=False))

    def supersede(self, replica: int, placement: str) -> None:
        """The newest start of a replica has its place; an older one is told to end."""
        before = self.places.take(replica, placement)
        if not before:
            return
        log.info("superseded replica=%s placement=%s by=%s", replica, before, placement)
        peer = self.peers.get(replica)
        if peer is not None:
            peer.tell(op="refused", error=self.places.refusal(replica, before, was_member=True))
            self.part_with(peer, "reset")  # nobody is seated before its successor is

    def decide_claims(self) -> None:
        """Take the epoch from the members that know a higher one, if they are enough to be sure:
        our record was lost, or is another machine's."""
        claim = self.claims.decided()
        if claim is None:
            return
        record = Record(
            job=self.record.job,
            epoch=claim.epoch,
            members=dict(claim.members),
            step=claim.step,
            superseded=self.places.superseded,
        )
        log.warning("record_adopted epoch=%s members=%s", claim.epoch, sorted(claim.members))
        self.keep(record)
        members = self.claims.of(claim.epoch)
        self.claims.clear()
        self.alive = dict(claim.members)
        self.places.holders.update(claim.members)
        self.started = self.last_contact = self.clock()
        self.fenced = False
        self.lost, self.broken_at = [], 0.0
        self.rendezvous = Rendezvous()
        self.admission.interrupt()
        for peer in [p for p in self.peers.values() if p.phase in ("claiming", "member")]:
            if peer.replica in members:
                peer.phase = "member"
            else:
                peer.begin()
                peer.tell(op="evicted", epoch=claim.epoch)
        for peer in self.newcomers():
            if peer.replica in self.alive:  # it, or whom it follows, trains in this epoch no more
                self.places.take(peer.replica, peer.placement)
                self.drop(peer.replica, "reset")
        if any(member.report for member in self.members()):
            self.break_epoch()

    def on_pong(self, peer: Peer, message: dict[str, Any]) -> None:
        peer.answered = int(message["n"])
        if peer.phase == "member":
            peer.step = int(message["step"])

    def on_ready(self, peer: Peer, message: dict[str, Any]) -> None:
        """A newcomer holds a state; who held one of the last epoch's trains in it no more."""
        if peer.phase == "member" or int(message["order"]) != peer.orders:
            return
        peer.phase = "ready"
        peer.step, peer.digest = int(message["step"]), str(message["digest"])
        peer.asked.clear()
        if self.record.members.get(peer.replica) == peer.placement:
            self.fenced = True
        if peer.expected not in (None, (peer.step, peer.digest)):
            log.warning("refused replica=%s expected=%s", peer.replica, peer.expected)
            peer.put_off(self.clock())

    def on_again(self, peer: Peer, message: dict[str, Any]) -> None:
        """It could not get what it was told to get; judge anew."""
        if peer.phase == "member":
            if int(message["epoch"]) != self.record.epoch:
                return  # said before it heard that it is a member: now it may get it
            self.drop(peer.replica, "reset")
        elif int(message["order"]) != peer.orders:
            return
        peer.put_off(self.clock())

    def on_report(self, peer: Peer, message: dict[str, Any]) -> None:
        claiming = peer.phase == "claiming"  # then it counts once its epoch is taken
        known = peer.phase == "member" and int(message["epoch"]) == self.record.epoch
        if not (claiming or known):
            return
        peer.step = int(message["step"])
        peer.report = Report(
            replica=peer.replica, step=peer.step, held=tuple(int(s) for s in message["held"])
        )
        peer.leaving = bool(message["leaving"])
        if known and not message["planned"]:
            self.break_epoch()

    def on_staged(self, peer: Peer, message: dict[str, Any]) -> None:
        self.admission.staged(peer, int(message["step"]), str(message["digest"]))

    def on_caught_up(self, peer: Peer, message: dict[str, Any]) -> None:
        if peer.phase == "ready":
            peer.step, peer.caught_up = int(message["step"]), True

    def on_set(self, _peer: Peer, message: dict[str, Any]) -> None:
        if int(message["epoch"]) == self.record.epoch:
            self.rendezvous.set(str(message["key"]), str(message["value"]))

    def on_get(self, peer: Peer, message: dict[str, Any]) -> None:
        if int(message["epoch"]) == self.record.epoch:
            self.rendezvous.get(peer, str(message["key"]), int(message["id"]))

    def on_goodbye(self, peer: Peer, _message: dict[str, Any]) -> None:
        """A replica leaves of its own will: nobody is told that it is lost."""
        self.peers.pop(peer.replica, None)
        self.admission.forget(peer.replica)
        self.claims.forget(peer.replica)
        if self.alive.get(peer.replica) == peer.placement:
            del self.alive[peer.replica]
            self.fenced = True
            self.begin_newcomers_anew()
            if self.alive:
                self.break_epoch()

    # --- losses ---------------------------------------------------------------------------------

    def gone(self, peer: Peer, how: str) -> None:
        """The peer's connection ended, or the peer is to be treated as if it had."""
        if self.peers.get(peer.replica) is peer:
            self.part_with(peer, how)
            self.settle()

    def part_with(self, peer: Peer, how: str) -> None:
        del self.peers[peer.replica]
        peer.writer.close()
        self.admission.forget(peer.replica)
        self.claims.forget(peer.replica)
        if peer.phase == "member" and self.alive.get(peer.replica) == peer.placement:
            if how == "reset" and self.was_frozen():
                log.warning("may_return replica=%s", peer.replica)  # tick() loses who does not
            else:
                self.lose(peer.replica, how)
        log.info("gone replica=%s placement=%s how=%s", peer.replica, peer.placement, how)

    def was_frozen(self) -> bool:
        """Whether we did not run for long until just now: members may have connected anew, and the
        ends of their old connections say nothing."""
        now = self.clock()
        return now - self.last_tick > FROZEN_S or now - self.woke < FROZEN_S

    def lose(self, replica: int, how: str) -> None:
        """A member is gone, and its connection with it."""
        placement = self.alive[replica]
        peer = self.peers.get(replica)
        if peer is not None and peer.placement == placement:
            del self.peers[replica]
            peer.writer.close()
            self.admission.forget(replica)
        self.drop(replica, how)

    def drop(self, replica: int, how: str) -> None:
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

    def tick(self) -> None:
        """Find what died silently. Time in which we ourselves did not run counts for nobody."""
        now = self.clock()
        late = now - self.last_tick - TICK_S
        self.last_tick = now
        if late > FROZEN_S:
            self.woke = self.started = now
        for peer in list(self.peers.values()):
            if late > TICK_S:
                peer.heard += late
            followed = peer.phase in ("member", "ready")
            if now - peer.heard > (PEER_SILENT_S if followed else NEWCOMER_SILENT_S):
                self.gone(peer, "heartbeat")
        if now - self.last_ping >= PING_S:
            self.last_ping = now
            for peer in self.peers.values():
                peer.ping()
        if now - self.started > (ABSENT_BROKEN_S if self.broken_at else ABSENT_S):
            for replica in [r for r in self.alive if r not in self.peers]:
                self.lose(replica, "heartbeat")
        for text in self.claims.overdue(now, UNDECIDED_S):
            log.error("undecided %s", text)
            for peer in [p for p in self.peers.values() if p.phase == "claiming"]:
                peer.tell(op="undecided", text=text)
        self.settle()

    # --- decisions ------------------------------------------------------------------------------

    def members(self) -> list[Peer]:
        found = [p for p in self.peers.values() if p.phase == "member" and p.replica in self.alive]
        return sorted(found, key=lambda p: p.replica)

    def newcomers(self, *phases: str) -> list[Peer]:
        """By their number; of these phases, if any is named."""
        known = phases or ("fresh", "loading", "syncing", "ready")
        found = [p for p in self.peers.values() if p.phase in known]
        return sorted(found, key=lambda p: p.replica)

    def settle(self) -> None:
        """Bring everyone one message further, if anything can be decided now."""
        try:
            if self.claims:
                self.decide_claims()
            if self.alive:
                self.settle_running()
            elif not self.claims:
                self.settle_cold()
        except OSError as error:  # nothing was granted; the next tick tries again
            log.error("record_not_written path=%s error=%s", self.file.path, error)

    def settle_cold(self) -> None:
        """Nobody trains: newcomers load what they have, agree on the newest, and begin."""
        there = self.newcomers()  # standbys too: one of them may hold the newest state
        if not there:
            self.first_newcomer = 0.0
            return
        self.first_newcomer = self.first_newcomer or self.clock()
        for peer in [p for p in there if p.phase == "fresh"]:
            if self.clock() >= peer.not_before:
                peer.order("load", "loading")
        waited = self.clock() - self.first_newcomer
        if not self.may_train_unseen():
            self.seat_standbys(gathered=waited > GATHER_S)
        peers = [p for p in there if not p.standby]
        enough = len(peers) >= self.world or (
            self.record.epoch > 0 and waited > GATHER_S and len(peers) >= self.min_replicas
        )
        if waited > GATHER_S:  # for a standby no longer
            there = [p for p in there if not p.standby or p.phase == "ready"]
        ready = peers and all(peer.phase == "ready" for peer in there)
        if not enough or not ready or self.may_train_unseen() or self.may_be_claimed():
            return
        source = max(there, key=lambda p: (p.step, -p.replica))
        equal = [p for p in there if (p.step, p.digest) == (source.step, source.digest)]
        behind = [p for p in peers if p not in equal]
        if behind:
            # Whoever took the last copies is ready: ask anew.
            self.admission.release(equal, wanted=True, followed=False)
            self.admission.advance(behind, equal, at_edge=True)
        else:
            self.grant({p.replica: p for p in peers})

    def seat_standbys(self, *, gathered: bool) -> None:
        """Nobody trains: give standbys the places of those who will not come back."""
        there = {peer.placement for peer in self.peers.values()}
        if not gathered and not {*self.record.members.values()} <= self.ended | there:
            return
        vacant = list(range(self.record.grant.get("world", self.world)))
        for peer in [p for p in self.newcomers() if p.standby]:
            wanted = [peer.place] if peer.standby == "migrate" else vacant
            for number in [n for n in wanted if n not in self.peers][:1]:
                self.seat(peer, number)

    def may_train_unseen(self) -> bool:
        """Whether the last epoch's members may all be there, out of our reach, and go on."""
        lease = self.lease_s + LEASE_MARGIN_S
        return not self.fenced and self.clock() - self.last_contact < lease

    def may_be_claimed(self) -> bool:
        """Whether our record may just have been lost: its members have not had time to say so."""
        return not self.record.epoch and self.clock() - self.started < ABSENT_BROKEN_S

    def settle_running(self) -> None:
        """Members train or wait at an edge; newcomers catch up and are let in at an edge."""
        members = self.members()
        if not members:
            return
        self.measure(members[0])
        entering = self.seats([p for p in self.newcomers("ready") if p.caught_up])
        if any(member.report is None for member in members):
            if not self.broken_at:  # else the next epoch comes first
                if len(members) == len(self.alive):  # all must agree on when to copy
                    self.bring_near(members, at_edge=False)
                for member in members if entering else []:
                    member.tell_once("edge", epoch=self.record.epoch)
            return
        if len(members) < len(self.alive):
            return
        if all(member.leaving for member in members) and len({m.step for m in members}) == 1:
            self.dismiss()
            return
        seated = {m.replica: m for m in members} | entering
        if len(seated) < self.min_replicas:
            self.bring_near(members, at_edge=True)
            return
        top = max(member.step for member in members)
        if set(entering) >= {m.replica for m in members} and top > min(
            peer.step for peer in entering.values()
        ):
            # Nobody would stay who holds the last step: it is handed on before.
            donors = [member.address for member in members]
            for peer in entering.values():
                peer.tell_once("catch_up", step=top, donors=donors)
            return
        # Nobody waits for a newcomer: it is handed what it may still lack, while others compute.
        self.grant(seated)

    def measure(self, member: Peer) -> None:
        """Refuse who came before there was a measure and does not fit."""
        for peer in self.newcomers():
            if error := difference(peer.shape, member.shape):
                peer.tell(op="refused", error=error)
                self.gone(peer, "reset")

    def bring_near(self, members: list[Peer], *, at_edge: bool) -> None:
        """Bring newcomers one message nearer to the members' state."""
        for peer in self.newcomers("ready"):
            if peer.expected is None:
                peer.begin()  # it loaded for a beginning that was none
        now = self.clock()
        taking = self.newcomers("syncing", "loading")
        if not taking:
            wanted, followed = bool(self.newcomers("fresh")), bool(self.newcomers("ready"))
            self.admission.release(members, wanted=wanted, followed=followed)
            top = max(member.step for member in members)
            holders = [m for m in members if m.step == top] if at_edge else members
            fresh = [p for p in self.newcomers("fresh") if now >= p.not_before]
            self.admission.advance(fresh, holders, at_edge=at_edge)

    def dismiss(self) -> None:
        """All members stand at the same last edge: now each may go without hurting another."""
        log.info("dismissed epoch=%s members=%s", self.record.epoch, sorted(self.alive))
        before = self.record
        self.keep(
            Record(
                job=before.job,
                epoch=before.epoch + 1,
                step=max(p.step for p in self.members()),
                superseded=self.places.superseded,
            )
        )
        self.alive = {}
        self.fenced = True
        self.begin_newcomers_anew()
        for peer in self.peers.values():
            peer.tell(op="dismissed")

    def grant(self, seated: dict[int, Peer]) -> None:
        """Make the next epoch durable, then tell its members what to do first."""
        before = self.record
        peers = list(seated.values())
        reports = [
            peer.report or Report(replica=number, step=peer.step) for number, peer in seated.items()
        ]
        shards = max(p.shards for p in peers)
        # What was granted counts, not who once asked: else shards of nobody would be dropped.
        world = max(before.grant.get("world", self.world), 1 + max(seated))
        drops = any(p.shape.get("mode") == "drop" for p in peers)
        plan = take_over(reports, shards, fixed_shares(shards, world) if drops else None)
        members = {number: seated[number].placement for number in sorted(seated)}
        message = {
            "op": "epoch",
            "epoch": before.epoch + 1,
            **plan.describe(),
            "begins": not self.alive,
            **introduce(seated, plan.behind),
            "joined": [n for n, p in seated.items() if p.phase != "member"] if before.epoch else [],
            "world": world,
            "lease_s": self.lease_s,
            "lost": self.lost,
            "started_at": self.broken_at or time.time(),
        }
        record = Record(
            job=before.job,
            epoch=before.epoch + 1,
            members=members,
            step=plan.step,
            grant=message,
            superseded=self.places.superseded,
        )
        self.keep(record)
        self.alive = dict(members)
        self.lost, self.broken_at = [], 0.0
        self.rendezvous = Rendezvous()
        self.first_newcomer = 0.0
        self.last_contact, self.fenced = self.clock(), False
        self.admission.interrupt()
        for number, peer in seated.items():
            if peer.standby:
                self.seat(peer, number)
            peer.enter()
            peer.tell(**message)
        for peer in self.newcomers("ready"):
            peer.tell(op="donors", donors=message["donors"])
        log.info("granted epoch=%s members=%s step=%s", record.epoch, sorted(members), plan.step)

    def seat(self, peer: Peer, number: int) -> None:
        """Give a standby its number; whoever has it goes."""
        leaver = self.peers.pop(number, None)
        if leaver is not None:
            self.admission.forget(number)
            leaver.tell(op="replaced", by=peer.placement)
        del self.peers[peer.replica]
        self.places.take(number, peer.placement)
        log.info("seated placement=%s replica=%s", peer.placement, number)
        peer.replica, peer.standby, peer.promoted = number, "", True
        self.peers[number] = peer

    def keep(self, record: Record) -> None:
        """Make a record durable. Raises OSError; ends this process if another one wrote it too."""
        try:
            self.file.advance(self.record.epoch, record)
        except StaleEpoch as error:
            log.critical("stale_epoch error=%s", error)
            raise SystemExit(1) from error
        self.record = record


def main() -> None:
    given = options(__doc__ or "")
    coordinator = Coordinator(
        RecordFile(given.state_dir, given.job),
        given.token,
        given.world,
        given.min_replicas,
        lease_s=given.lease,
        any_claim=given.adopt == "any",
    )
    asyncio.run(run(coordinator, given.host, given.port, given.port_file))


if __name__ == "__main__":
    main()
