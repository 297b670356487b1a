"""The first rank's loop: epochs granted, lost and entered, while its replica trains.

A step is its global batch, not who computes it. When a member dies, the others keep the gradients
they have, compute only the shards that are missing, and commit the same step. Nothing here rolls
back.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from runtime.checkpoint.tiers import TIERS, TierName
from runtime.client import TOLD_TO_END, Because, CheckpointSaved
from runtime.data import Shard
from runtime.replica.all_ranks import HASHED_FOR, AllRanks
from runtime.replica.gradients import Tail, Wishes
from runtime.replica.link import STILL_AWAY_S, Link, Refused
from runtime.replica.membership import REJOINS, Severed, Silent
from runtime.replica.rank import Rank
from runtime.replica.reporting import Committed, Reporter
from runtime.replica.siblings import Sibling, Siblings
from runtime.replica.step import NotWhole
from runtime.replica.stragglers import Stragglers

log = logging.getLogger("drydock.replica")

LEAVE_S = 5.0  # how long a stopping member waits for the coordinator's leave to go
#: How long one that wants the whole job to stop waits for an epoch in which it can say so, while
#: the coordinator is there: if it went before, the others would train on.
STOP_S = 30.0
#: How often who waits for an epoch looks whether it is to end: that may only have been noted.
LOOK_S = 1.0
#: Who is told to end waits so long for the others to be told too: a launcher needs a moment to tell
#: all. At most a quarter of the time until it is killed.
ALL_TOLD_S = 2.0

#: Why we leave, in words, and for whoever is to know whether the job goes on.
DONE, WANTED = "all steps done", "stop wanted"
BECAUSE: dict[str, Because] = {DONE: "over", WANTED: "over", TOLD_TO_END: "told"}


class Leader:
    """Speaks to the coordinator for its replica, and decides what all its ranks do."""

    def __init__(
        self,
        rank: Rank,
        shape: dict[str, str],
        shape_of_ranks: dict[str, str],
        reporter: Reporter,
        *,
        steps: int | None,
        compare_every: int,
        straggler_after_s: float,
        leave: Callable[..., None],
        abandon: Callable[[str], None],
    ) -> None:
        """`shape`: what must be alike on all replicas, `shape_of_ranks`: on all ranks of ours.
        `steps` ends the job. `compare_every`:
        see `AllRanks`; `straggler_after_s`: see `Stragglers`. `leave`: ends this process's part in
        it; `abandon`: at once, for a rank is gone."""
        self.job = job = rank.job
        self.rank = rank
        self.engine = rank.engine
        self.link = rank.link = Link(job.coordinator, self.introduce, self.on_break)
        self.reporter = reporter
        self.steps = steps
        self._shape = shape
        self._leave_job = leave
        self._left = False
        self._why = ""  # why we go, once that is agreed
        self._saved_last = False  # the state of the edge at which that was
        self._told_at: float | None = None  # monotonic: when we were told to end
        self._postponed: deque[dict[str, Any]] = deque()
        self._noticed = False  # the others heard in a step that we were told
        self._want_checkpoint = threading.Event()
        self._owed: set[TierName] = set()  # ours alone are due there, and there was no room yet
        self._warm = False  # room for checkpoints was asked for
        self._others: list[Sibling] = []
        self.siblings = Siblings(
            rank.host,
            job.token,
            job.ranks,
            self.link,
            self._on_sibling,
            lambda lost: abandon(f"rank {lost} of this replica is gone"),
            shape_of_ranks,
        )
        self.together = AllRanks(rank, self.siblings, reporter, compare_every=compare_every)
        self.member = self.together.member
        self.link.trains = lambda: self.member.epoch > 0
        self.link.on_strange = lambda why: job.trouble("coordinator_refuses", why)
        self._stragglers = Stragglers(straggler_after_s)
        self.sharing = self.together.sharing
        self.engine.announce = lambda shard: self.siblings.tell("compute", index=shard)
        rank.tell = self._tell

    @property
    def address(self) -> str:
        """Where the other ranks reach us."""
        return self.siblings.address

    def start(self) -> None:
        """Meet the other ranks and go to the coordinator. Raises Incomplete."""
        self._others = self.siblings.meet()
        self.link.start()

    def shards(self) -> Iterator[Shard]:
        """Shards to compute, for as long as the job lives."""
        self._await_epoch()
        while not self._left:
            if self._is_done():
                self._stop(DONE)
                continue
            severed: str | None = None
            silent = False
            try:
                with self.rank.stalls.computing():
                    yield from self.engine.shards()
                self._edge(self._finish_step())
            except NotWhole as error:
                self.job.trouble("coverage", str(error))
            except Severed as error:
                severed, silent = str(error), isinstance(error, Silent)
            # Not above: the error holds the former group, which another thread is to destroy.
            if severed is not None:
                log.info(
                    "severed epoch=%s step=%s error=%s",
                    self.member.epoch,
                    self.engine.pending,
                    severed,
                )
                self.rank.observer.at("regroup", self.engine.pending)
                self._regroup(planned=False, silent=silent, why=severed)

    def _is_done(self) -> bool:
        return self.steps is not None and self.engine.pending >= self.steps

    def leave(self, reason: str, *, goodbye: bool) -> None:
        """The other ranks leave too; without a goodbye they end as soon as we have."""
        self._left = True
        if goodbye:
            self.siblings.tell("leave", reason=reason)
        else:
            self.siblings.close()
        self._leave_job(reason, goodbye=goodbye)

    def close(self, *, goodbye: bool) -> None:
        """The other replicas need not wait for what we still write; we wait for our other ranks."""
        # A goodbye of one that still waits for its place would be heard once it is given that.
        waits = not (self.member.epoch or self.link.heard)
        self.link.close(goodbye=goodbye and not waits)
        self.rank.saver.finish()
        if goodbye:
            self.siblings.await_leave()

    def wish_stop(self) -> None:
        self.job.stop.set()
        self.link.inbox.put({"op": "wished"})

    def wish_leave(self) -> None:
        self._told_at = self._told_at or time.monotonic()
        self.job.told.set()
        self.link.inbox.put({"op": "wished"})

    def wish_checkpoint(self) -> None:
        self._want_checkpoint.set()

    # --- one step -------------------------------------------------------------------------------

    def _finish_step(self) -> Tail:
        """Sum, commit, and judge what came of it. Raises Severed, NotWhole, DoesNotTrain."""
        self._pump()
        leaves = self._leaves_alone()
        self.rank.wishes = Wishes(
            regroup=self.member.wants_regroup,
            checkpoint=self._want_checkpoint.is_set(),
            stop=self.job.stop.is_set(),
            told=int(self.job.told.is_set()),
            leaves=leaves,
            stage=self.member.wants_stage > 0 and self.together.ready_to_stage(),
            compare=self.together.ready_to_compare(),
            prove=self.together.ready_to_prove(),
            **self._due(),
        )
        tail = self.together.reduce()
        self.member.agree_to_stage(tail.wishes.stage)
        self._await_lease()
        made = self.together.commit()
        self.together.judge(made)  # before what may sever us: all are to judge alike
        self._watch_pace(tail)
        return tail

    def _leaves_alone(self) -> bool:
        """Whether we go at the edge that comes, for we were told to and the others were not."""
        if not self.job.told.is_set():
            return False
        if not self._noticed:  # it may be that all are to be killed, and only we were told in time
            self._noticed = True
            self._want_checkpoint.set()
        self._told_at = self._told_at or time.monotonic()
        patience_s = min(ALL_TOLD_S, self.rank.preemption.grace_s / 4)
        return time.monotonic() - self._told_at >= patience_s

    def _watch_pace(self, tail: Tail) -> None:
        """Who is slower than its peers, of which one member tells."""
        for pace in self._stragglers.note(tail.who, tail.seconds, time.monotonic()):
            if self.reporter.speaks():
                kind = "straggler" if pace.slow else "straggler_recovered"
                self.job.trouble(kind, str(pace), f"replica {pace.replica}")

    def _tell(self, step: Committed) -> None:
        self.reporter.committed(step.step, step.epoch, step.loss, step.grad_norm, step.samples)

    def _edge(self, tail: Tail) -> None:
        """Between two steps: what all members agreed on in the last all-reduce."""
        self._pump()
        if self._is_done() or tail.wishes.stop:
            self._stop(DONE if self._is_done() else WANTED)
            return
        if tail.wishes.told >= len(self.member.members):
            self._stop(TOLD_TO_END)
            return
        if not self._warm:  # by the time that a copy is wanted, for whatever, there is room
            self._warm = True
            self.together.prepare_save()
        self._save(tail.wishes)
        if tail.wishes.checkpoint:
            self._want_checkpoint.clear()
        if self.member.stages:
            self.together.stage()
        if tail.wishes.compare >= len(self.member.members):
            self.together.compare()
        if self.rank.wishes.prove:
            self.together.prove()
        if tail.wishes.regroup or tail.wishes.leaves:
            self._regroup(planned=True, leaving=self.rank.wishes.leaves)

    def _due(self) -> dict[str, Any]:
        """In which tiers a checkpoint is due, and whether we could write our share of the shared
        one. One clock counts for all: all pay for it at the same edge, and then all hold the same
        step."""
        if self.together.passes_on():
            self._owed.discard("shared")
        due = self.rank.saver.due() if self.reporter.speaks() else set()
        if "shared" in due or self.sharing.is_stuck():
            self.together.ready({"shared"})  # which tells where it is not
        saves = not self.together.holds_back
        members = sorted(self.member.members)
        return {
            **{name: name in due for name in TIERS},
            **self.sharing.wishes(
                members.index(self.member.replica),
                len(members),
                due="shared" in due,
                able=saves and self.together.can_share(),
                free=saves and self.together.can_write_alone(),
            ),
        }

    def _save(self, wishes: Wishes) -> None:
        """The checkpoints that are due, if there is room for a copy, else at a later edge."""
        saver = self.rank.saver
        due = {name for name in saver.tiers if wishes.checkpoint or getattr(wishes, name)}
        saver.agreed(due)
        self.together.hear_of_shared(wishes)
        members = sorted(self.member.members)
        place = members.index(self.member.replica)
        who = self.sharing.decide(wishes, len(members))
        self._owed |= {name for name in due & self._ours() if name != "shared"}
        if who == "one" and place == self.sharing.writer:
            self._owed.add("shared")
            self.together.begins_alone()
        elif who == "all":
            self._owed.discard("shared")
        if self.together.holds_back:
            return
        ready = self.together.ready(self._owed)
        if not ready or not self.together.prepare_save(ready):
            ready = set()
        self._owed -= ready
        if who == "all":
            self.together.save({"shared", *ready}, share=(place, len(members)))
        elif ready:
            self.together.save(ready)

    def _save_last(self) -> None:
        """Before we go: also where the shared folder cannot be written. Not before the first step:
        nothing was trained, and no job goes on from that; nor what leads nowhere."""
        tiers = self._ours() - {"shared"}
        members = self.reporter.present
        if members and members[self.sharing.turn % len(members)] == self.reporter.replica:
            tiers |= {"shared"}  # whose turn it was before may be who cannot write there
        leads_nowhere = self.rank.losses.lost or self.rank.state.spoilt
        if self.together.committed >= 0 and tiers and not leads_nowhere:
            self.together.save(self.rank.in_time(tiers), last=True)

    def _ours(self) -> set[TierName]:
        """The tiers that we save to: each replica to those of its own, one of them for all to the
        shared folder."""
        tiers = self.rank.saver.tiers
        return {name for name in tiers if tiers[name].own or self.reporter.speaks()}

    # --- epochs ---------------------------------------------------------------------------------

    def _regroup(
        self, *, planned: bool, leaving: bool = False, silent: bool = False, why: str = ""
    ) -> None:
        """Tell the coordinator how far we are and wait for the next epoch, or to be let go."""
        if leaving:
            self._why = TOLD_TO_END
        self.member.report(planned=planned, leaving=leaving, silent=silent, why=why)
        self._await_epoch()

    def _await_epoch(self) -> None:
        """Do what the coordinator asks until an epoch is granted and entered."""
        while not self._left:
            message = self._next()
            if message["op"] == "dismissed":
                self._leave_as(message)
            elif message["op"] == "replaced":
                self.job.sender.speaks = False  # the others train on
                self.leave(f"replaced by {message['by']}", goodbye=True)
            elif message["op"] == "refused":
                raise Refused(f"coordinator {self.job.coordinator}: {message['error']}")
            elif message["op"] != "wished" and self.member.hear(message):
                self._why, self._saved_last = "", False
                return

    def _leave_as(self, dismissed: dict[str, Any]) -> None:
        """Nobody needs us any more, or we are to end and nobody answers."""
        if dismissed.get("alone"):  # others hold what we hold, and go on
            self.rank.preemption.edge()
            self.job.sender.speaks = False
        elif not self._saved_last:
            self._save_last()
        sent_away = TOLD_TO_END if self.job.told.is_set() else "stopped while waiting for an epoch"
        over = WANTED if dismissed.get("over") else ""
        self.leave(self._why or over or sent_away, goodbye=True)

    def _is_to_end(self) -> bool:
        return self.job.stop.is_set() or self.job.told.is_set()

    def _await_lease(self) -> None:
        """Whom the coordinator has not heard of for long may have been replaced: it goes no further
        before it knows. Raises Severed if it was."""
        tell_at = 0.0
        while (silent_s := self.link.silent_s()) > self.member.lease_s:
            if (now := time.monotonic()) >= tell_at:
                tell_at = now + STILL_AWAY_S
                log.warning("holding step=%s silent_s=%.1f", self.engine.pending, silent_s)
            self.link.await_word(self.member.lease_s)
            self._pump()
            if self._is_to_end():
                raise Severed("told to stop, and out of the coordinator's reach")

    def _next(self) -> dict[str, Any]:
        """The next message; who is to stop dismisses itself when none comes."""
        if self._postponed:
            return self._postponed.popleft()
        stopping = self._is_to_end()
        if stopping and not self.member.epoch:
            return {"op": "dismissed"}
        leaving = stopping or self._why
        asked = time.monotonic()
        while True:
            try:
                return self.link.inbox.get(timeout=LEAVE_S if leaving else LOOK_S)
            except queue.Empty:
                if not leaving:
                    return {"op": "wished"}
                wished = not (self.job.told.is_set() or self._why)
                heard = self.link.silent_s() <= LEAVE_S
                if not (wished and heard and time.monotonic() - asked < STOP_S):
                    return {"op": "dismissed"}

    def _stop(self, reason: str) -> None:
        """All members stop at this edge: save, and go when all are known to have reached it.

        Whoever went earlier could break the last all-reduce of a slower one.
        """
        self._save_last()
        self._why, self._saved_last = reason, True
        self.member.report(planned=True, leaving=True, over=BECAUSE[reason] == "over")
        self._await_epoch()

    # --- what may be heard at any time ----------------------------------------------------------

    def _pump(self) -> None:
        """Handle what arrived while we computed."""
        while not self.link.inbox.empty():
            message = self.link.inbox.get()
            if message["op"] in REJOINS:
                self._postponed.append(message)
                raise Severed("the coordinator ended our epoch")
            if message["op"] != "wished":
                self.member.overhear(message)

    def on_break(self, epoch: int, _message: dict[str, Any]) -> None:
        """On the link's thread: make the collectives under way fail now."""
        self.rank.gloo.sever(epoch)
        self.siblings.tell("broken", epoch=epoch)

    def _on_sibling(self, rank: int, message: dict[str, Any]) -> None:
        """On a thread of its own: what another rank of this replica says."""
        if message["op"] in HASHED_FOR:
            digest = str(message["digest"])
            self.together.hashed(message["op"], int(message["step"]), digest, rank=rank)
        elif message["op"] == "saved":
            del message["op"]
            self.together.saved(rank, CheckpointSaved(**message))
        elif message["op"] == "shared_failed":
            self.together.shared_failed(bool(message["shared_out"]))
        elif message["op"] == "stop":
            self.wish_stop()
        elif message["op"] == "told":
            self.wish_leave()

    def introduce(self) -> list[dict[str, Any]]:
        """What we say first, and again after each reconnect."""
        join = {
            "op": "join",
            "token": self.job.token,
            "job": self.job.name,
            **self.member.standing(),
            "placement": self.job.placement,
            "addresses": [self.rank.address, *(one.address for one in self._others)],
            "holders": [self.rank.holder, *(one.holder for one in self._others)],
            "gloo": [self.rank.gloo.address, *(one.gloo for one in self._others)],
            "shards": self.rank.state.batches.shards,
            "shape": self._shape,
            "world": self.job.world_replicas,
        }
        report = self.member.last_report
        return [join] if report is None else [join, {"op": "report", **report}]
