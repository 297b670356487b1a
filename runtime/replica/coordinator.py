"""The one process that grants epochs: `python -m runtime.replica.coordinator`.

Standard library only. Members propose, this process decides, durably, before it tells anyone. It
must never stand on the path of a healthy step: its death costs no step.

One TCP connection per member, JSON lines. The first line carries the job's token. The verbs are
`join`, `ready`, `report`, `caught_up`, `proof`, `set`, `get`, `ping`, `again`, `goodbye` from
replicas, and `exit` and `status` from a node agent or a person.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import time
from collections.abc import Callable
from typing import Any

from runtime.replica.connection import Peer, read_line, tell_difference
from runtime.replica.listening import TICK_S, options, run
from runtime.replica.places import Places
from runtime.replica.plan import Report, fixed_shares, take_over
from runtime.replica.record import Record, RecordFile, StaleEpoch
from runtime.replica.shape import difference, misfit

log = logging.getLogger("drydock.coordinator")

PEER_SILENT_S = 2.0  # a member that said nothing for so long is dead
NEWCOMER_SILENT_S = 20.0  # a newcomer may be busy importing or loading
ABSENT_S = 2.0  # after our own restart: how long a member of the record has to come back
ABSENT_BROKEN_S = 1.0  # the same where others wait for the next epoch: time to connect again
GATHER_S = 10.0  # a whole job that starts again: how long to wait for the rest of it
CATCH_UP_S = 2.0  # how long members wait at an edge for a newcomer to catch up
FIRST_LINE_S = 10.0  # how long a stranger may take to say who it is


class Coordinator:
    """All decisions, driven by messages and by `tick`; holds no state but the record's."""

    def __init__(self, record_file: RecordFile, token: str, world: int, min_replicas: int) -> None:
        self.file = record_file
        self.record = record_file.read()
        self.token = token
        self.world = world  # how many the first epoch waits for; the ranks know it too
        self.min_replicas = min_replicas
        self.peers: dict[int, Peer] = {}
        #: the members of the current epoch that are not known to be gone
        self.alive: dict[int, str] = dict(self.record.members)
        self.places = Places(self.record)
        self.lost: list[dict[str, Any]] = []  # since the epoch was granted
        self.broken_at = 0.0  # Unix time when the current epoch was found broken; 0: it is whole
        self.edge_at = 0.0  # monotonic time since when all members wait at an edge; 0: they do not
        self.values: dict[str, str] = {}  # rendezvous of the current epoch
        self.waiting: dict[str, list[tuple[Peer, int]]] = {}
        self.started = time.monotonic()
        self.first_newcomer = 0.0
        self.last_tick = time.monotonic()

    # --- connections ----------------------------------------------------------------------------

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its first line to its end."""
        peer: Peer | None = None
        try:
            async with asyncio.timeout(FIRST_LINE_S):
                first = await read_line(reader)
            if first is None:
                return
            refusal = self.refusal(first)
            if refusal:
                writer.write(json.dumps({"ok": False, "error": refusal}).encode() + b"\n")
                return
            if first["op"] == "join":
                peer = self.join(first, writer)
                await self.listen(reader, peer)
            else:
                answer = self.answer(first)
                writer.write(json.dumps(answer).encode() + b"\n")
        except (OSError, ValueError, KeyError, asyncio.LimitOverrunError) as error:
            log.warning("connection_failed error=%r", error)
        except asyncio.CancelledError:
            peer = None  # it is we who end, not the peer
            raise
        finally:
            if peer is not None:
                self.gone(peer, "reset")
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            writer.close()

    def refusal(self, first: dict[str, Any]) -> str:
        given = str(first.get("token", "")).encode()
        if not hmac.compare_digest(given, self.token.encode()):
            return "wrong token: give the job's DRYDOCK_TOKEN in the first line"
        if first.get("op") not in ("join", "exit", "status"):
            return f"unknown op {first.get('op')!r}: begin with join, exit or status"
        if first["op"] == "join":
            was_member = 0 < int(first["epoch"]) <= self.record.epoch
            taken = self.places.refusal(int(first["replica"]), str(first["placement"]), was_member)
            others = [p for p in self.peers.values() if p.replica != int(first["replica"])]
            known = [(p.shape, p.phase == "member") for p in others]
            return taken or misfit(first, self.world, known)
        return ""

    async def listen(self, reader: asyncio.StreamReader, peer: Peer) -> None:
        verbs: dict[str, Callable[[Peer, dict[str, Any]], None]] = {
            "ping": self.on_ping,
            "ready": self.on_ready,
            "report": self.on_report,
            "caught_up": self.on_caught_up,
            "proof": self.on_proof,
            "again": self.on_again,
            "set": self.on_set,
            "get": self.on_get,
            "goodbye": self.on_goodbye,
        }
        while (message := await read_line(reader)) is not None:
            if self.peers.get(peer.replica) is not peer:
                return
            peer.heard = time.monotonic()
            verbs[message["op"]](peer, message)
            self.settle()

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["op"] == "exit":
            replica, placement = int(message["replica"]), str(message["placement"])
            if self.alive.get(replica) == placement:
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
        replica, placement = int(message["replica"]), str(message["placement"])
        peer = Peer.of(message, writer)
        if not self.record.epoch:
            self.world = max(self.world, int(message["world"]))
        self.supersede(replica, placement)
        previous = self.peers.get(replica)
        if previous is not None and previous.placement == placement:
            del self.peers[replica]  # the same process on a new connection: nobody is lost
            previous.writer.close()
        elif previous is not None:
            self.gone(previous, "reset")
        told_epoch = int(message["epoch"])
        if told_epoch > self.record.epoch:
            self.adopt(told_epoch, message)
        named = self.alive.get(replica) == placement
        if named and told_epoch == self.record.epoch:
            peer.phase = "member"
        elif named and self.record.grant:
            # We died between making the epoch durable and telling this member.
            peer.phase = "member"
            peer.tell(**self.record.grant)
        elif replica in self.alive:
            self.lose(replica, "reset")
        if peer.phase == "member" and self.broken_at:
            for entry in self.lost:
                peer.tell(op="lost", epoch=self.record.epoch, **entry)
            peer.tell(op="broken", epoch=self.record.epoch)
        self.peers[replica] = peer
        if told_epoch and peer.phase != "member":
            peer.tell(op="evicted", epoch=self.record.epoch)
        log.info("joined replica=%s placement=%s as=%s", replica, placement, peer.phase)
        self.settle()
        return peer

    def supersede(self, replica: int, placement: str) -> None:
        """The newest start of a replica has its place; an older one is told to end."""
        before = self.places.take(replica, placement)
        if not before:
            return
        log.info("superseded replica=%s placement=%s by=%s", replica, before, placement)
        peer = self.peers.get(replica)
        if peer is not None:
            peer.tell(op="refused", error=self.places.refusal(replica, before, was_member=True))
            self.gone(peer, "reset")

    def adopt(self, epoch: int, message: dict[str, Any]) -> None:
        """Take the epoch from a member that knows a higher one: our record was lost."""
        members = {int(replica): str(name) for replica, name in message["members"].items()}
        record = Record(
            job=self.record.job,
            epoch=epoch,
            members=members,
            step=int(message["step"]),
            superseded=self.places.superseded,
        )
        log.warning("record_adopted epoch=%s members=%s", epoch, sorted(members))
        self.keep(record)
        self.alive = dict(members)
        self.places.holders.update(members)
        self.started = time.monotonic()

    def on_ping(self, peer: Peer, message: dict[str, Any]) -> None:
        if peer.phase == "member":
            peer.step = int(message["step"])

    def on_ready(self, peer: Peer, message: dict[str, Any]) -> None:
        if peer.phase == "member":
            return
        peer.phase = "ready"
        peer.step, peer.digest = int(message["step"]), str(message["digest"])
        peer.asked.clear()

    def on_again(self, peer: Peer, _message: dict[str, Any]) -> None:
        """A newcomer could not get what it was told to get; judge anew."""
        if peer.phase != "member":
            peer.put_off()

    def on_report(self, peer: Peer, message: dict[str, Any]) -> None:
        if peer.phase != "member" or int(message["epoch"]) != self.record.epoch:
            return
        peer.step = int(message["step"])
        peer.report = Report(
            replica=peer.replica, step=peer.step, held=tuple(int(s) for s in message["held"])
        )
        peer.leaving = bool(message["leaving"])
        if not message["planned"]:
            self.break_epoch()

    def on_caught_up(self, peer: Peer, message: dict[str, Any]) -> None:
        peer.step, peer.digest = int(message["step"]), str(message["digest"])
        peer.caught_up = True

    def on_proof(self, peer: Peer, message: dict[str, Any]) -> None:
        peer.step, peer.proof = int(message["step"]), str(message["digest"])

    def on_set(self, _peer: Peer, message: dict[str, Any]) -> None:
        if int(message["epoch"]) != self.record.epoch:
            return
        key = str(message["key"])
        self.values[key] = str(message["value"])
        for waiter, number in self.waiting.pop(key, []):
            waiter.tell(op="value", id=number, value=self.values[key])

    def on_get(self, peer: Peer, message: dict[str, Any]) -> None:
        if int(message["epoch"]) != self.record.epoch:
            return
        key, number = str(message["key"]), int(message["id"])
        if key in self.values:
            peer.tell(op="value", id=number, value=self.values[key])
        else:
            self.waiting.setdefault(key, []).append((peer, number))

    def on_goodbye(self, peer: Peer, _message: dict[str, Any]) -> None:
        """A replica leaves of its own will: nobody is told that it is lost."""
        self.peers.pop(peer.replica, None)
        if self.alive.get(peer.replica) == peer.placement:
            del self.alive[peer.replica]
        if self.alive:
            self.break_epoch()

    # --- losses ---------------------------------------------------------------------------------

    def gone(self, peer: Peer, how: str) -> None:
        """The peer's connection ended, or the peer is to be treated as if it had."""
        if self.peers.get(peer.replica) is not peer:
            return
        del self.peers[peer.replica]
        peer.writer.close()
        if peer.phase == "member" and self.alive.get(peer.replica) == peer.placement:
            self.lose(peer.replica, how)
        log.info("gone replica=%s placement=%s how=%s", peer.replica, peer.placement, how)
        self.settle()

    def lose(self, replica: int, how: str) -> None:
        placement = self.alive.pop(replica)
        entry = {"replica": replica, "placement": placement, "how": how, "at": time.time()}
        self.lost.append(entry)
        peer = self.peers.get(replica)
        if peer is not None and peer.placement == placement:
            del self.peers[replica]
            peer.writer.close()
        log.warning("lost replica=%s placement=%s how=%s", replica, placement, how)
        for member in self.members():
            member.tell(op="lost", epoch=self.record.epoch, **entry)
        self.break_epoch()

    def break_epoch(self) -> None:
        if not self.broken_at:
            self.broken_at = time.time()
            for member in self.members():
                member.tell(op="broken", epoch=self.record.epoch)

    def tick(self) -> None:
        """Find what died silently. Time in which we ourselves did not run counts for nobody."""
        now = time.monotonic()
        late = now - self.last_tick - TICK_S
        self.last_tick = now
        for peer in list(self.peers.values()):
            if late > TICK_S:
                peer.heard += late
            limit = PEER_SILENT_S if peer.phase == "member" else NEWCOMER_SILENT_S
            if now - peer.heard > limit:
                self.gone(peer, "heartbeat")
        if now - self.started > (ABSENT_BROKEN_S if self.broken_at else ABSENT_S):
            for replica in [r for r in self.alive if r not in self.peers]:
                self.lose(replica, "heartbeat")
        self.settle()

    # --- decisions ------------------------------------------------------------------------------

    def members(self) -> list[Peer]:
        found = [p for p in self.peers.values() if p.phase == "member" and p.replica in self.alive]
        return sorted(found, key=lambda p: p.replica)

    def newcomers(self) -> list[Peer]:
        found = [p for p in self.peers.values() if p.phase != "member"]
        return sorted(found, key=lambda p: p.replica)

    def settle(self) -> None:
        """Bring everyone one message further, if anything can be decided now."""
        try:
            if self.alive:
                self.settle_running()
            else:
                self.settle_cold()
        except OSError as error:  # nothing was granted; the next tick tries again
            log.error("record_not_written path=%s error=%s", self.file.path, error)

    def settle_cold(self) -> None:
        """Nobody trains: newcomers load what they have, agree on the newest, and begin."""
        peers = self.newcomers()
        if not peers:
            self.first_newcomer = 0.0
            return
        self.first_newcomer = self.first_newcomer or time.monotonic()
        for peer in peers:
            if peer.phase in ("fresh", "syncing"):
                peer.phase = "loading"
                peer.tell(op="load")
        waited = time.monotonic() - self.first_newcomer
        enough = len(peers) >= self.world or (
            self.record.epoch > 0 and waited > GATHER_S and len(peers) >= self.min_replicas
        )
        if not enough or any(peer.phase != "ready" for peer in peers):
            return
        source = max(peers, key=lambda p: (p.step, -p.replica))
        behind = [p for p in peers if (p.step, p.digest) != (source.step, source.digest)]
        for peer in behind:
            peer.phase = "loading"
            peer.tell(op="sync", donors=[source.address], refusals=peer.refusals)
        if not behind:
            self.grant(peers, [Report(replica=p.replica, step=p.step) for p in peers])

    def settle_running(self) -> None:
        """Members train or wait at an edge; newcomers catch up and are let in at an edge."""
        members = self.members()
        for peer in self.newcomers():
            if peer.phase == "fresh" and members and time.monotonic() >= peer.not_before:
                if error := difference(peer.shape, members[0].shape):
                    peer.tell(op="refused", error=error)  # it came before there was a measure
                    self.gone(peer, "reset")
                    return
                peer.phase = "syncing"
                peer.tell(op="sync", donors=[m.address for m in members], refusals=peer.refusals)
        ready = [p for p in self.newcomers() if p.phase == "ready"]
        if len(members) < len(self.alive) or not members:
            return
        if any(member.report is None for member in members):
            self.edge_at = 0.0
            if ready and not self.broken_at:
                for member in members:
                    member.tell_once("edge", epoch=self.record.epoch)
            return
        if all(member.leaving for member in members) and not self.broken_at:
            self.dismiss()
            return
        self.edge_at = self.edge_at or time.monotonic()
        entering = self.entering(members, ready)
        if entering is None or len(members) + len(entering) < self.min_replicas:
            return
        reports = [m.report for m in members if m.report is not None]
        top = max(report.step for report in reports)
        reports += [Report(replica=p.replica, step=top) for p in entering]
        self.grant([*members, *entering], reports)

    def entering(self, members: list[Peer], ready: list[Peer]) -> list[Peer] | None:
        """The newcomers that proved to hold the members' state; None while that is open.

        A broken epoch waits for nobody as long as enough members are left.
        """
        if not ready or (self.broken_at and len(members) >= self.min_replicas):
            return []
        reports = [m.report for m in members if m.report is not None]
        top = max(report.step for report in reports)
        upright = [m for m in members if m.step == top]
        for member in upright:
            member.tell_once("prove", step=top)
        for peer in ready:
            peer.tell_once("catch_up", step=top, donors=[m.address for m in upright])
        late = time.monotonic() - self.edge_at > CATCH_UP_S
        done = [p for p in ready if p.caught_up and p.step == top]
        if not late and (len(done) < len(ready) or any(not m.proof for m in upright)):
            return None
        proofs = {m.proof for m in upright if m.proof}
        if len(proofs) > 1:
            tell_difference(upright, top)
        equal = [p for p in done if proofs == {p.digest}]
        for peer in [p for p in ready if p not in equal]:
            log.warning("refused replica=%s digest=%s proofs=%s", peer.replica, peer.digest, proofs)
            peer.put_off()
        return equal

    def dismiss(self) -> None:
        """All members stand at the same last edge: now each may go without hurting another."""
        log.info("dismissed epoch=%s members=%s", self.record.epoch, sorted(self.alive))
        self.alive = {}
        for peer in self.peers.values():
            peer.tell(op="dismissed")

    def grant(self, peers: list[Peer], reports: list[Report]) -> None:
        """Make the next epoch durable, then tell its members what to do first."""
        before = self.record
        shards = max(p.shards for p in peers)
        # What was granted counts, not who once asked: else shards of nobody would be dropped.
        world = max(before.grant.get("world", self.world), 1 + max(p.replica for p in peers))
        drops = any(p.shape.get("mode") == "drop" for p in peers)
        plan = take_over(reports, shards, fixed_shares(shards, world) if drops else None)
        members = {p.replica: p.placement for p in sorted(peers, key=lambda p: p.replica)}
        donors = [p.address for p in peers if p.replica not in plan.behind and p.phase == "member"]
        message = {
            "op": "epoch",
            "epoch": before.epoch + 1,
            "begins": not any(p.phase == "member" for p in peers),
            "members": [
                {"replica": p.replica, "placement": p.placement, "gloo_port": p.gloo_port}
                for p in sorted(peers, key=lambda p: p.replica)
            ],
            "step": plan.step,
            "held": plan.held,
            "assign": plan.assign,
            "taken_over": list(plan.taken_over),
            "dropped": list(plan.dropped),
            "world": world,
            "behind": list(plan.behind),
            "donors": donors,
            "lost": self.lost,
            "joined": [p.replica for p in peers if p.phase != "member"] if before.epoch else [],
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
        self.lost, self.broken_at, self.edge_at = [], 0.0, 0.0
        self.values, self.waiting = {}, {}
        self.first_newcomer = 0.0
        for peer in peers:
            peer.phase, peer.report, peer.proof = "member", None, ""
            peer.leaving = peer.caught_up = False
            peer.refusals = 0
            peer.asked.clear()
            peer.tell(**message)
        for peer in self.newcomers():
            peer.asked.discard("catch_up")
            peer.caught_up = False
        log.info("granted epoch=%s members=%s step=%s", record.epoch, sorted(members), plan.step)

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
        RecordFile(given.state_dir, given.job), given.token, given.world, given.min_replicas
    )
    asyncio.run(run(coordinator, given.host, given.port, given.port_file))


if __name__ == "__main__":
    main()
