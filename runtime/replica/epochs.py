"""Which epoch begins, when, and with whom: from what the roster knows, and only if it is durable.

Standard library only. Decides; what is said and heard on a connection is the coordinator's.
"""

from __future__ import annotations

import logging
import math
import time

from runtime.replica.connection import Peer, introduce
from runtime.replica.plan import Report, fixed_shares, take_over
from runtime.replica.reach import Doubt
from runtime.replica.record import Record
from runtime.replica.rendezvous import Rendezvous
from runtime.replica.roster import Roster
from runtime.replica.shape import difference

log = logging.getLogger("drydock.coordinator")

#: A whole job that starts again: how long to wait for one replica more, which may hold the newest
#: state. As torch's elastic rendezvous waits for a last call.
GATHER_S = 30.0
LEASE_MARGIN_S = 1.0  # for clocks that do not run alike
ABSENT_BROKEN_S = 1.0  # how long one has to connect again while others wait for the next epoch
LAG_S = 10.0  # so long one that follows may make no step while the members make several
#: Who loads or takes a state for longer may hang: the others go on without it, and it comes in once
#: it is done. A terabyte takes 17 minutes at one gigabyte a second. Whoever could not get it is
#: given as much again for each time that it tried, so that a slow one gets there.
HUNG_S = 1200.0
MAX_FAILED = 3  # so often one may fail to take the newest state before others begin without it
UNWRITTEN_S = 60.0  # no more often is it logged, for one reason, that the record is not written


class Epochs(Roster):
    """Begins with the first job, ends with the dismissal of the last member."""

    def settle(self) -> None:
        """Bring everyone one message further, if anything can be decided now."""
        self.stirred.set()
        try:
            if self.claims:
                self.decide_claims()
            if self.alive:
                self.gathered = {}
                self.settle_running()
            elif not self.claims:
                self.settle_cold()
        except OSError as error:  # nothing was granted; the next tick tries again
            self.log_unwritten(str(error))

    def log_unwritten(self, why: str) -> None:
        """Once, and again now and then: it is tried ten times a second."""
        before, at = self.unwritten
        if why != before or self.clock() - at >= UNWRITTEN_S:
            self.unwritten = (why, self.clock())
            log.error("record_not_written path=%s error=%s", self.file.path, why)

    def settle_cold(self) -> None:
        """Nobody trains: newcomers load what they have, agree on the newest, and begin."""
        there = self.newcomers()  # standbys too: one of them may hold the newest state
        if not there:
            self.gathered = {}
            return
        for peer in there:
            self.gathered.setdefault(peer.standby or peer.replica, self.clock())
        for peer in [p for p in there if p.phase == "fresh"]:
            if self.clock() >= peer.not_before:
                peer.order("load", "loading", holders=[])
        # They come one by one, and the last may be the one that holds the newest state.
        waited = self.clock() - max(self.gathered.values())
        if not self.may_train_unseen():
            self.seat_standbys(gathered=waited > GATHER_S)
        patience_s = ABSENT_BROKEN_S if any(map(self.was_member, there)) else GATHER_S
        late = self.record.epoch > 0 and waited > patience_s
        hanging = self.hanging()
        failed = [p for p in there if p.phase == "fresh" and p.refusals >= MAX_FAILED]
        failed += [p for p in hanging if self.holds_no_newer(p, there)]
        able = [p for p in there if p not in failed]
        if late and sum(not p.standby for p in able) >= self.min_replicas:
            there = able  # who came and failed comes in later, as any newcomer
        peers = [p for p in there if not p.standby]
        world = max(self.world, self.record.grant.get("world", 0))
        enough = len(peers) >= world or (late and len(peers) >= self.min_replicas)
        if waited > GATHER_S:  # for a standby no longer
            there = [p for p in there if not p.standby or p.phase == "ready"]
        self.tell_awaited([p for p in hanging if p in there])
        ready = peers and all(peer.phase == "ready" for peer in there)
        if not enough or not ready or self.may_train_unseen() or self.may_be_claimed():
            return
        # A later epoch goes on from what was settled: what an earlier one made beyond that, and
        # somebody still has on a disk, is no part of the training. Before the first step who has an
        # import goes before who does not see it.
        source = max(there, key=lambda p: (p.trained_in, p.step, p.loaded, -p.replica))
        if (holders := self.unattended(there)) and not source.searched:
            source.searched = True
            source.order("load", "loading", holders=holders)
            return
        equal = [p for p in there if (p.step, p.digest) == (source.step, source.digest)]
        behind = [p for p in peers if p not in equal]
        if behind and self.clock() < self.copies_from:
            return
        if behind:
            # Whoever took the last copies is ready: ask anew.
            self.admission.release(equal, wanted=True, followed=False)
            beside = [p for p in equal if not p.standby]
            self.admission.advance(behind, equal, beside, at_edge=True)
        else:
            self.grant({p.replica: p for p in peers})

    def was_member(self, peer: Peer) -> bool:
        """Whether it holds what it had as a member of the last epoch: at most the step that was
        made when that broke is newer, and nobody who was started anew has more."""
        member = self.record.members.get(peer.replica) == peer.placement
        return member and peer.phase == "ready" and peer.step >= self.record.step

    def hanging(self) -> list[Peer]:
        """Newcomers that have loaded or taken a state for so long that they may never be done,
        though another thread of theirs answers."""
        now = self.clock()
        busy = self.newcomers("loading", "syncing")
        self.ordered = {p.orders: self.ordered.get(p.orders, now) for p in busy}
        since = {n: max(at, self.woke) for n, at in self.ordered.items()}
        found = [p for p in busy if now - since[p.orders] > HUNG_S * (1 + p.refusals)]
        for peer in [p for p in found if "hangs" not in p.asked]:
            peer.asked.add("hangs")
            named = (peer.replica, peer.placement, peer.phase)
            log.error("hangs replica=%s placement=%s phase=%s", *named)
        return found

    def awaited(self, *phases: str) -> list[Peer]:
        """Newcomers of these phases, but for those who hang."""
        hanging = self.hanging()
        return [p for p in self.newcomers(*phases) if p not in hanging]

    def holds_no_newer(self, peer: Peer, there: list[Peer]) -> bool:
        """Whether what one that is not ready has, or may find, is surely no newer than what those
        hold who are."""
        ready = [p for p in there if p.phase == "ready"]
        if any(map(self.was_member, ready)):
            return True
        newest = max(((p.trained_in, p.step) for p in ready), default=(-1, -1))
        return peer.phase == "syncing" and (peer.trained_in, peer.step) <= newest

    def tell_awaited(self, hanging: list[Peer]) -> None:
        """A person, once: the others cannot begin without these, though they may hang."""
        names = ", ".join(f"{p.replica} ({p.placement})" for p in hanging)
        text = (
            f"all wait for replica {names}, which has loaded its state for long and may hold the "
            "newest: end its process if it hangs"
        )
        for peer in self.newcomers("ready") if hanging else []:
            peer.tell_once("undecided", text=text)

    def unattended(self, there: list[Peer]) -> list[list[str]]:
        """The holders on nodes of which nobody came: what one of them keeps may be the newest."""
        attended = [peer.held_at for peer in there]
        return [at for at in self.record.holders.values() if at and at not in attended]

    def seat_standbys(self, *, gathered: bool) -> None:
        """Nobody trains: give standbys the places of those who will not come back."""
        there = {peer.placement for peer in self.peers.values()}
        if not gathered and not {*self.record.members.values()} <= self.ended | there:
            return
        vacant = list(range(self.record.grant.get("world", self.world)))
        standbys = [p for p in self.newcomers() if p.standby]
        spares = [p for p in standbys if p.standby == "spare"]
        if not gathered and len(spares) < len(vacant):
            # Those who died are being started again, and must not find their places taken.
            standbys = [p for p in standbys if p not in spares]
        for peer in standbys:
            wanted = [peer.place] if peer.standby == "migrate" else vacant
            for number in [n for n in wanted if n not in self.peers][:1]:
                self.seat(peer, number)

    def may_train_unseen(self) -> bool:
        """Whether the last epoch's members may all be there, out of our reach, and go on."""
        # They hold to what they were granted, whatever we were started with since.
        lease = max(self.lease_s, self.record.grant.get("lease_s", 0.0)) + LEASE_MARGIN_S
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
        ready = [p for p in self.newcomers("ready") if not self.lags(p, members)]
        level = [p for p in ready if p.caught_up]
        entering = self.seats([p for p in level if p.proven])
        if any(member.report is None for member in members):
            if not self.broken_at:  # else the next epoch comes first
                if len(members) == len(self.alive):  # all must agree on when to copy
                    self.bring_near(members, at_edge=False)
                    # By the time that one has loaded its copy it may be proven after the next step.
                    followers = self.awaited("syncing", "ready")
                    self.proofs.seek(followers, members, self.clock())
                if entering:
                    self.call_to_edge(members)
            return
        if len(members) < len(self.alive):
            return
        if self.doubt.open:
            self.settle_doubt(members)
            members = self.members()
        if self.doubt.open:
            return
        if all(member.leaving for member in members) and len({m.step for m in members}) == 1:
            self.dismiss()
            return
        members = self.let_go(members)
        top = max(member.step for member in members)
        seated = {m.replica: m for m in members} | entering
        if len(seated) < self.min_replicas:
            # No step is made that would prove anything: a copy of where they stand is the proof.
            entering = self.seats([p for p in level if p.proven or p.took(top)])
            seated |= entering
        if len(seated) < self.min_replicas:
            self.bring_near(members, at_edge=True)
            return
        if set(entering) >= {m.replica for m in members} and top > min(
            peer.step for peer in entering.values()
        ):
            # Nobody would stay who holds the last step: it is handed on before.
            donors = [member.addresses for member in members]
            for peer in entering.values():
                peer.tell_once("catch_up", step=top, donors=donors)
            return
        # Nobody waits for a newcomer: it is handed what it may still lack, while others compute.
        self.grant(seated)

    def call_to_edge(self, members: list[Peer]) -> None:
        """Have them stop for a newcomer, once it is sure that the next epoch can be recorded: where
        it cannot they would stand there until it can. Raises OSError."""
        untold = [member for member in members if "edge" not in member.asked]
        if not untold or not self.folder_answers():
            return
        self.file.draft(self.record)
        for member in untold:
            member.tell_once("edge", epoch=self.record.epoch)

    def lags(self, peer: Peer, members: list[Peer]) -> bool:
        """Whether one that followed the members makes no step any more: it may hang, and whoever
        entered with it would wait for ever. How long a step takes does not count: whoever follows
        is two behind as each is made, for it makes one once the next is there."""
        if max(member.step for member in members) <= peer.followed + 1:
            peer.behind_since = None
            return False
        now = self.clock()
        if peer.behind_since is None:
            peer.behind_since = now
        return now - max(peer.behind_since, peer.followed_at) > LAG_S

    def settle_doubt(self, members: list[Peer]) -> None:
        """A member found another silent: ask all whom they reach, and do without those who are out
        of others' reach. They come back as newcomers, once they reach all."""
        unasked = self.doubt.unasked([member.replica for member in members])
        peers = {member.replica: member for member in members}
        for replica in unasked:
            others = {n: p.addresses for n, p in peers.items() if n != replica}
            peers[replica].tell_once("probe", epoch=self.record.epoch, peers=others)
        if unasked:
            return
        found = self.doubt.settle({n: peer.step for n, peer in peers.items()})
        self.doubt = Doubt()
        for peer in peers.values():
            peer.asked.discard("probe")  # the network may fail anew before the next epoch begins
        for replica in found:
            self.drop(replica, "unreached")
            peers[replica].put_off(self.clock(), "it does not reach the others, nor they it")
            peers[replica].tell(op="evicted", epoch=self.record.epoch)

    def measure(self, member: Peer) -> None:
        """Refuse who came before there was a measure and does not fit."""
        for peer in self.newcomers():
            if error := difference(peer.shape, member.shape):
                peer.tell(op="refused", error=error)
                self.gone(peer, "reset")

    def bring_near(self, members: list[Peer], *, at_edge: bool) -> None:
        """Bring newcomers one message nearer to the members' state."""
        top = max(member.step for member in members)
        for peer in self.newcomers("ready"):
            # It loaded for a beginning that was none, or follows where no step is made any more.
            if peer.expected is None or (at_edge and not (peer.proven or peer.took(top))):
                peer.begin()
        now = self.clock()
        taking = self.awaited("syncing", "loading")
        if not taking:
            wanted, followed = bool(self.newcomers("fresh")), bool(self.newcomers("ready"))
            self.admission.release(members, wanted=wanted, followed=followed)
            holders = [m for m in members if m.step == top] if at_edge else members
            fresh = [p for p in self.newcomers("fresh") if now >= p.not_before]
            self.admission.advance(fresh, holders, members, at_edge=at_edge)

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
        taken = {*self.peers, *self.alive, *found}
        vacant = [n for n in numbers if n not in taken]
        spares = [p for p in waiting if p.standby == "spare"]
        return found | dict(zip(vacant, spares, strict=False))

    def seat(self, peer: Peer, number: int) -> None:
        """Give a standby its number; whoever has it goes."""
        leaver = self.peers.pop(number, None)
        if leaver is not None:
            self.admission.forget(number)
            leaver.tell(op="replaced", by=peer.placement)
        del self.peers[peer.replica]
        self.admission.forget(peer.replica)  # by its new number nobody waits for its copy
        self.places.take(number, peer.placement)
        log.info("seated placement=%s replica=%s", peer.placement, number)
        peer.replica, peer.standby, peer.promoted = number, "", True
        self.peers[number] = peer
        if not self.alive:
            self.gathered.setdefault(number, -math.inf)  # it did not come just now

    def let_go(self, members: list[Peer]) -> list[Peer]:
        """At an edge: those who leave alone go, if who stays holds the last step. Who stays. Where
        the job is over all go at once, or none."""
        leaving = [member for member in members if member.leaving and not member.over]
        staying = [member for member in members if member not in leaving]
        if not staying or max(m.step for m in staying) < max(m.step for m in members):
            return members
        for member in leaving:
            log.info("left replica=%s placement=%s", member.replica, member.placement)
            del self.peers[member.replica], self.alive[member.replica]
            self.admission.forget(member.replica)
            self.left.append(member.replica)
            member.tell(op="dismissed", alone=True)
        return staying

    def dismiss(self) -> None:
        """All members stand at the same last edge: now each may go without hurting another. Where
        the job is over newcomers go too; else they wait for whoever is started next."""
        before, members = self.record, self.members()
        over = any(member.over for member in members)
        self.keep(
            Record(
                job=before.job,
                epoch=before.epoch + 1,
                step=max(p.step for p in members),
                superseded=self.places.superseded,
                holders=before.holders,
            )
        )
        log.info("dismissed epoch=%s members=%s", before.epoch, sorted(self.alive))
        self.alive = {}
        self.fenced = True
        self.begin_newcomers_anew()
        for peer in self.peers.values() if over else members:
            peer.tell(op="dismissed", over=over)

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
        plan = take_over(
            reports,
            shards,
            fixed_shares(shards, world) if drops else None,
            added=[number for number in seated if self.alive and number not in self.alive],
        )
        members = {number: seated[number].placement for number in sorted(seated)}
        # A record that was lost must not make later training look older than what it goes on from,
        # or than what nobody could go on from and is there again one day.
        seen = [max(peer.trained_in, peer.seen_epoch) for peer in self.peers.values()]
        epoch = max(before.epoch, *seen) + 1
        # The state that the members begin from, if they do.
        epoch_before = max((p.trained_in for p in peers if p.step == plan.step), default=0)
        started_at = self.broken_at or time.time()
        message = {
            "op": "epoch",
            "epoch": epoch,
            **plan.describe(),
            "begins": not self.alive,
            "began": {
                "epoch": epoch_before,
                "step": plan.step,
                "at": started_at,
                "first": epoch,
            }
            if not self.alive
            else before.grant.get("began"),
            **introduce(seated, plan.behind),
            "joined": [n for n, p in seated.items() if p.phase != "member"] if before.epoch else [],
            "world": world,
            "lease_s": self.lease_s,
            "lost": self.lost,
            "left": self.left,
            "started_at": started_at,
        }
        record = Record(
            job=before.job,
            epoch=epoch,
            members=members,
            step=plan.step,
            grant=message,
            superseded=self.places.superseded,
            holders=before.holders | {number: p.held_at for number, p in seated.items()},
        )
        self.keep(record)
        # Of scripts that train otherwise the first step shows it; a standby may have been proven
        # long ago. Later the members compare their states seldom.
        beginning, standing_by = not self.alive, any(peer.standby for peer in peers)
        self.comparison.doubt |= len(peers) > 1 and (beginning or standing_by)
        self.alive = dict(members)
        self.lost, self.left, self.broken_at = [], [], 0.0
        self.rendezvous, self.doubt = Rendezvous(), Doubt()
        self.gathered = {}
        self.last_contact, self.fenced = self.clock(), False
        self.admission.interrupt()
        self.proofs.begin()
        for number, peer in seated.items():
            if peer.standby:
                self.seat(peer, number)
            peer.enter()
            peer.tell(**message)
            if self.comparison.doubt:
                peer.tell(op="compare")
        for peer in self.newcomers("ready"):
            peer.tell(op="donors", donors=message["donors"])
        log.info("granted epoch=%s members=%s step=%s", record.epoch, sorted(members), plan.step)

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
            holders=self.record.holders,
        )
        self.keep(record)
        log.warning("record_adopted epoch=%s members=%s", claim.epoch, sorted(claim.members))
        members = self.claims.of(claim.epoch)
        self.claims.clear()
        self.alive = dict(claim.members)
        self.places.holders.update(claim.members)
        self.started = self.last_contact = self.clock()
        self.fenced = False
        self.lost, self.left, self.broken_at = [], [], 0.0
        self.rendezvous, self.doubt = Rendezvous(), Doubt()
        self.admission.interrupt()
        self.proofs.begin()
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
