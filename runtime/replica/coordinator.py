"""The one process that grants epochs: `python -m runtime.replica.coordinator`.

Standard library only. Members propose, this process decides, durably, before it tells anyone. It
must never stand on the path of a healthy step: its death costs no step.

One TCP connection per member, JSON lines. The first line carries the job's token. The verbs are
`join`, `ready`, `report`, `unreached`, `staged`, `compared`, `proved`, `caught_up`, `set`, `get`,
`pong`, `again`, `goodbye` from replicas, and `exit` and `status` from a node agent or a person.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from runtime.replica.comparing import tell_difference
from runtime.replica.connection import Peer
from runtime.replica.epochs import ABSENT_BROKEN_S, Epochs
from runtime.replica.keeper import Keeper
from runtime.replica.plan import Report
from runtime.replica.proving import Difference
from runtime.replica.record import RecordFile, StaleEpoch, Unusable, hold_alone
from runtime.replica.roster import FROZEN_S, TICK_S
from runtime.replica.server import options, run
from runtime.replica.shape import misfit
from runtime.replica.succession import Superseded

log = logging.getLogger("drydock.coordinator")

PING_S = 0.5  # how often each peer is asked for a sign of life
NEWCOMER_SILENT_S = 20.0  # a newcomer may be busy importing or loading
HANDOVER_S = 15.0  # how long a predecessor that was told to end may take
#: What a replica says of itself when it joins, at the least.
OF_A_JOIN = (
    "job", "replica", "placement", "standby", "world", "shards", "epoch", "step", "members",
    "addresses", "gloo",
)  # fmt: skip
PLACEMENT_REMEDY = "give each start a DRYDOCK_PLACEMENT of its own, or none"
#: What changes nothing that is to be decided: as a group is built its members say it all the time.
ASIDE = frozenset({"pong", "set", "get"})
NO_COPY_S = 2.0  # after one could not be made, while nobody trains
UNDECIDED_S = 10.0  # how long members that we do not know wait before a person is told


@dataclass(frozen=True)
class Asked:
    """A place that a newcomer wants, and what is waited for before it is free.

    `holder` is the peer that has the place, None if that peer is away. `ping` is the number of the
    ping that was sent to it. `since` is when the wait began, in seconds of the coordinator's clock.
    """

    holder: Peer | None
    ping: int
    since: float


class Coordinator(Epochs):
    """The coordinator's decisions, driven by the messages of replicas and agents and by `tick`.

    It has no thread of its own; `server` calls it.
    """

    # --- connections ----------------------------------------------------------------------------

    def refusal(self, first: dict[str, Any]) -> str:
        """Why whoever says this first line is not listened to; "" if it is."""
        given = str(first.get("token", "")).encode()
        if not hmac.compare_digest(given, self.token.encode()):
            return (
                "wrong token: this process's is not the job's, which its coordinator was started "
                "with; give it the job's DRYDOCK_TOKEN"
            )
        if first.get("op") not in ("join", "exit", "status"):
            return f"unknown op {first.get('op')!r}: begin with join, exit or status"
        if first["op"] == "join":
            if lacking := [name for name in OF_A_JOIN if name not in first]:
                return (
                    f"this replica's first line lacks {', '.join(lacking)}: run the coordinator "
                    "and all replicas with one version of Drydock"
                )
            if first["job"] != self.record.job:
                return (
                    f"this replica's job is {first['job']}, the coordinator's is "
                    f"{self.record.job}: give each job a coordinator of its own"
                )
            for peer in self.peers.values():
                own = peer.replica == int(first["replica"]) and not first["standby"]  # see place_of
                if peer.is_another(first) and not own:
                    who = f"replica {peer.replica}" if peer.replica >= 0 else "a standby"
                    return f"{who} is called {peer.placement} too: {PLACEMENT_REMEDY}"
            holder = self.peers.get(int(first["replica"]))
            promoted = holder if holder is not None and holder.promoted else None
            if promoted and promoted.placement != first["placement"] and not first["standby"]:
                return Superseded(
                    f"{promoted.placement}, which stood by, has taken the place of replica "
                    f"{promoted.replica}: this process must end"
                )
            was_member = 0 < int(first["epoch"]) <= self.record.epoch
            taken = self.places.refusal(int(first["replica"]), str(first["placement"]), was_member)
            others = [p for p in self.peers.values() if p.replica != int(first["replica"])]
            known = [(p.replica, p.shape, p.phase == "member") for p in others]
            return taken or misfit(first, self.world, known)
        return ""

    def place_of(self, first: dict[str, Any], asked: Asked | None) -> Asked | str:
        """Whom to wait for before whoever says this first line may join, or why it never may; ""
        once its place is free. To be called anew, with what it returned, whenever we are stirred.

        If the process that has the place answers once more, it lives, and the newcomer is none that
        follows a dead one: somebody started the job, or the replica, twice. If it was cut off or
        stopped, it makes way within the time that its silence takes.
        """
        if refusal := self.refusal(first):
            return refusal
        if asked is None:  # it says this once, however often its place is looked at
            self.note_word()
        replica, placement = int(first["replica"]), str(first["placement"])
        told_epoch = int(first["epoch"])
        claims = told_epoch > self.record.epoch and not self.claims.outranks(replica, told_epoch)
        if first["standby"] or claims:
            return ""  # it takes no place, or tells us who has which
        holder = self.peers.get(replica)
        if holder is None:
            if self.alive.get(replica, placement) == placement:
                return ""
            # It may connect again: to us, who were started anew or did not run for long.
            if asked is None or asked.holder is not None:
                asked = Asked(None, 0, self.clock())
            since = max(asked.since, self.started, self.woke)
            if self.was_frozen() or self.clock() - since <= self.silent_s:
                return asked
            self.lose(replica, "heartbeat")
            return ""
        if holder.placement == placement and not holder.is_another(first):
            return ""
        if asked is None or asked.holder is not holder:
            return Asked(holder, holder.ping(), self.clock())
        if holder.answered < asked.ping:
            now = self.clock()
            asked_long_ago = now - max(asked.since, self.woke) > self.silent_s
            if not (asked_long_ago and now - holder.spoke > self.silence_of(holder)):
                return asked
            self.gone(holder, "heartbeat")
            return self.place_of(first, None)
        remedy = "give each job an id of its own (DRYDOCK_JOB), or end that process first"
        if holder.placement == placement:
            remedy = PLACEMENT_REMEDY
        return Superseded(
            f"replica {replica} of {self.record.job} lives, as {holder.placement}: {remedy}"
        )

    def hear(self, peer: Peer, message: dict[str, Any]) -> bool:
        """Act on one message; False if the peer speaks on a connection that counts no more."""
        verbs: dict[str, Callable[[Peer, dict[str, Any]], None]] = {
            "pong": self.on_pong,
            "ready": self.on_ready,
            "report": self.on_report,
            "unreached": self.on_unreached,
            "staged": self.on_staged,
            "compared": self.on_compared,
            "proved": self.on_proved,
            "caught_up": self.on_caught_up,
            "again": self.on_again,
            "set": self.on_set,
            "get": self.on_get,
            "goodbye": self.on_goodbye,
        }
        if self.peers.get(peer.replica) is not peer:
            return False
        # A member must answer: one that still sends but hears nothing is as dead as a silent one.
        self.note_word(peer, alive=peer.phase != "member" or message["op"] == "pong")
        if peer.phase == "member":
            self.last_contact = peer.spoke
        verbs[message["op"]](peer, message)
        if message["op"] in ASIDE:
            self.stirred.set()
        else:
            self.settle()
        return True

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a first line that is no join: to `exit` of an agent, or to `status`.

        `exit` says that the process of a placement has ended. A replica of that placement is lost
        at once, without a wait for its heartbeat. `status` changes nothing. It tells the job, the
        epoch, the living members, the newest known step, and the phase of each peer.
        """
        if message["op"] == "exit":
            placement = str(message["placement"])
            self.ended.add(placement)
            if placement in self.record.members.values():
                self.fenced = True
            for replica in [n for n, name in self.alive.items() if name == placement]:
                self.lose(replica, "agent")
            for peer in [p for p in self.peers.values() if p.placement == placement]:
                self.part_with(peer, "agent")  # it was none yet
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
        """Take in a replica whose first line was accepted, and return its peer.

        There are four outcomes. A standby follows, unless it is a member by now and returns. A
        replica that tells of a newer epoch than the record's is `claiming`. A member of the present
        epoch that connects again stays a member. Any other is a newcomer, and is told `evicted` if
        it was ever a member.

        An older connection or start of the same replica is given up. Raises KeyError, TypeError or
        ValueError for a malformed message.
        """
        self.note_word()
        if message["standby"]:
            return self.stand_by(message, writer)
        replica, placement = int(message["replica"]), str(message["placement"])
        peer = Peer.of(message, writer, self.clock())
        if not (self.record.grant or self.alive):  # else what was granted counts, not who asks
            self.world = max(self.world, int(message["world"]))
        self.supersede(replica, placement)
        previous = self.peers.get(replica)
        if previous is not None and previous.placement == placement:
            del self.peers[replica]  # the same process on a new connection: nobody is lost
            previous.writer.close()
            self.admission.interrupt()
            self.proofs.interrupt()
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
            self.proofs.interrupt()
        for number in [n for n, name in self.alive.items() if name == peer.placement]:
            if self.returns(peer, 0):
                peer.replica, peer.standby = number, ""
            else:
                self.lose(number, "reset")
        if peer.standby:
            self.dismiss_earlier(peer)
            self.places.stand_by(peer.placement)
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
        self.admission.returned()
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

    def supersede(self, replica: int, placement: str) -> None:
        """The newest start of a replica has its place; an older one, which did not answer any more
        or has not been heard of, is told to end."""
        before = self.places.take(replica, placement)
        if not before:
            return
        log.info("superseded replica=%s placement=%s by=%s", replica, before, placement)
        peer = self.peers.get(replica)
        if peer is not None:
            peer.tell(op="refused", error=self.places.refusal(replica, before, was_member=True))
            self.part_with(peer, "reset")  # nobody is seated before its successor is

    def on_pong(self, peer: Peer, message: dict[str, Any]) -> None:
        peer.answered = int(message["n"])
        if peer.phase == "member":
            self.note_step(peer, int(message["step"]))
        elif int(message["step"]) != peer.followed:
            peer.followed, peer.followed_at = int(message["step"]), self.clock()

    def note_step(self, member: Peer, step: int) -> None:
        """How far it is; a step of this epoch shows that it and all others reach each other.

        A member only gets further: what says less was written before, by another of its threads."""
        member.step = max(member.step, step)
        if step > self.record.step:
            member.refusals = 0

    def on_ready(self, peer: Peer, message: dict[str, Any]) -> None:
        """A newcomer holds a state; who held one of the last epoch's trains in it no more."""
        if peer.phase == "member" or int(message["order"]) != peer.orders:
            return
        peer.phase = "ready"
        peer.step, peer.digest = int(message["step"]), str(message["digest"])
        peer.trained_in = int(message.get("trained_in", 0))
        peer.seen_epoch = int(message.get("seen", 0))
        peer.loaded = bool(message.get("loaded", False))
        peer.asked.clear()
        if self.record.members.get(peer.replica) == peer.placement:
            self.fenced = True
        if peer.expected not in (None, (peer.step, peer.digest)):
            log.warning("refused replica=%s expected=%s", peer.replica, peer.expected)
            peer.put_off(self.clock(), "its state was not the members' once it was loaded")

    def on_again(self, peer: Peer, message: dict[str, Any]) -> None:
        """It could not get what it was told to get; judge anew."""
        if peer.phase == "member":
            if int(message["epoch"]) != self.record.epoch:
                return  # said before it heard that it is a member: now it may get it
            self.drop(peer.replica, "reset")
        elif int(message["order"]) != peer.orders:
            return
        peer.put_off(self.clock(), "it could not get a state or a step from those who have it")

    def on_report(self, peer: Peer, message: dict[str, Any]) -> None:
        """Note where a member stands after its epoch broke: its step, and which shards it holds.

        A report counts only from a claiming peer, or from a member that names the present epoch.
        One that was not planned breaks the epoch. If it tells of a silent peer, members are asked
        whom they reach.
        """
        claiming = peer.phase == "claiming"  # then it counts once its epoch is taken
        known = peer.phase == "member" and int(message["epoch"]) == self.record.epoch
        if not (claiming or known):
            return
        self.note_step(peer, int(message["step"]))
        peer.report = Report(
            replica=peer.replica, step=peer.step, held=tuple(int(s) for s in message["held"])
        )
        peer.leaving, peer.over = bool(message["leaving"]), bool(message.get("over"))
        if known and not message["planned"]:
            self.break_epoch()
        if known and message.get("silent"):
            self.doubt.open = True

    def on_unreached(self, peer: Peer, message: dict[str, Any]) -> None:
        if peer.phase == "member" and int(message["epoch"]) == self.record.epoch:
            self.doubt.answer(peer.replica, [int(replica) for replica in message["replicas"]])

    def on_staged(self, peer: Peer, message: dict[str, Any]) -> None:
        """Note that a peer holds a copy of its state ready for newcomers, or could not make one.

        An empty digest means that it could not. If the copy was asked for, fresh newcomers are then
        put off. While nobody trains, no copy is asked for within the next NO_COPY_S seconds.
        """
        if message["digest"]:
            self.admission.staged(peer, int(message["step"]), str(message["digest"]))
        elif self.admission.not_staged(peer):
            # Not at once: what fails each time would cost each step, or never end.
            self.copies_from = self.clock() + NO_COPY_S
            for newcomer in self.newcomers("fresh"):
                newcomer.put_off(self.clock(), "no member could make a copy of its state")

    def on_compared(self, peer: Peer, message: dict[str, Any]) -> None:
        """Note the digest of a member's state after a step; members of another epoch are not heard.

        Once the digests of all living members are there, each member is told of a difference, if
        any.
        """
        epoch, step = int(message["epoch"]), int(message["step"])
        if peer.phase != "member" or epoch != self.record.epoch:
            return
        digest = str(message["digest"])
        states = self.comparison.hear(peer.replica, epoch, step, digest, self.alive)
        if states is not None:
            self.comparison.doubt = False
            tell_difference(self.members(), step, states)

    def on_proved(self, peer: Peer, message: dict[str, Any]) -> None:
        """What a member, or one that follows, held after a step whose mark asked for it; "" if it
        could make no copy of it."""
        step, digest = int(message["step"]), str(message["digest"])
        if peer.phase == "ready" and int(message["order"]) == peer.orders:
            if not digest:
                peer.put_off(self.clock(), "it could make no copy of its state, to be compared")
                return
            peer.proofs[step] = digest
        elif peer.phase == "member" and int(message["epoch"]) == self.record.epoch:
            self.proofs.witnessed(peer.replica, step, digest)
            # Not asked again at once: what fails each time would cost each step.
            for newcomer in [p for p in self.newcomers("ready") if not (digest or p.proven)]:
                newcomer.put_off(self.clock(), "no member could make a copy to compare it with")
        for newcomer in self.newcomers("ready"):
            before = newcomer.proven
            if found := self.proofs.judge(newcomer, self.clock()):
                self.turn_away(newcomer, found)
            elif newcomer.proven and not before:
                newcomer.tell(op="proven")

    def turn_away(self, peer: Peer, found: Difference) -> None:
        """A newcomer makes something else of the members' steps, or the witness errs: that it is
        not the witness, only the members together can say."""
        log.critical("newcomer_differs placement=%s %s", peer.placement, found)
        peer.tell(op="differs", **vars(found))
        peer.put_off(self.clock(), "it made another state of the members' steps than they")
        self.comparison.doubt = True
        for member in self.members():
            member.tell(op="compare")

    def on_caught_up(self, peer: Peer, message: dict[str, Any]) -> None:
        if peer.phase == "ready":
            peer.step, peer.caught_up = int(message["step"]), True
            peer.followed, peer.followed_at = peer.step, self.clock()

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
            self.left.append(peer.replica)
            self.fenced = True
            self.begin_newcomers_anew()
            if self.alive:
                self.break_epoch()

    # --- what they do not say -------------------------------------------------------------------

    def tick(self) -> None:
        """Find what died silently. Time in which we did not run, or heard of nobody at all, counts
        for nobody."""
        now = self.clock()
        late = now - self.last_tick - TICK_S
        self.last_tick = now
        if late > FROZEN_S:
            self.woke = self.started = now
        cut_off = self.is_cut_off()
        for peer in list(self.peers.values()):
            if late > TICK_S:
                peer.heard += late
            if now - peer.heard > self.silence_of(peer) and not cut_off:
                self.gone(peer, "heartbeat")
        if now - self.last_ping >= PING_S:
            self.last_ping = now
            for peer in self.peers.values():
                peer.ping()
        there_for = now - max(self.started, self.woke)
        if there_for > (ABSENT_BROKEN_S if self.broken_at else self.silent_s) and not cut_off:
            for replica in [r for r in self.alive if r not in self.peers]:
                self.lose(replica, "heartbeat")
        for text in self.claims.overdue(now, UNDECIDED_S):
            log.error("undecided %s", text)
            for peer in [p for p in self.peers.values() if p.phase == "claiming"]:
                peer.tell(op="undecided", text=text)
        self.settle()

    def silence_of(self, peer: Peer) -> float:
        """For how long it may be silent."""
        if peer.phase in ("member", "ready"):
            return self.silent_s
        return max(self.silent_s, NEWCOMER_SILENT_S)


def main() -> None:
    """Run the job's coordinator until SIGTERM or SIGINT.

    Raises SystemExit with the reason if another coordinator has the folder, the record cannot be
    used, or nothing can listen at the address. The process exits at once, with status 1, if a
    coordinator on another machine takes over the folder.
    """
    given = options(__doc__ or "")
    keeper = Keeper(given.state_dir)
    try:
        lock = hold_alone(given.state_dir, HANDOVER_S)
        keeper.take_over()
    except StaleEpoch as error:
        raise SystemExit(str(error)) from error
    # At once: no member is to hear of us any more, or its lease would not run out.
    keeper.keep(lambda: os._exit(1))
    try:
        coordinator = Coordinator(
            RecordFile(given.state_dir, given.job),
            given.token,
            given.world,
            given.min_replicas,
            lease_s=given.lease,
            silent_s=given.silence,
            any_claim=given.adopt == "any",
        )
    except Unusable as error:
        raise SystemExit(str(error)) from error
    coordinator.folder_answers = keeper.answers
    with lock:
        asyncio.run(run(coordinator, given.host, given.port, given.port_file))
        keeper.release()


if __name__ == "__main__":
    main()
