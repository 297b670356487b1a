"""Carries out on all ranks of a replica at once what membership decides for it."""

from __future__ import annotations

import functools
import math
import textwrap
import threading
import time
import uuid
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from runtime.checkpoint.manifest import digest_of_all
from runtime.checkpoint.sources import OF_ALL_NODES
from runtime.checkpoint.store import WHICH_ARE_WHOLE
from runtime.checkpoint.suspects import (
    HELD_BACK_S,
    TRIAL_STEPS,
    DoesNotTrain,
    Losses,
    Trial,
)
from runtime.checkpoint.tiers import TierName
from runtime.client import CheckpointSaved
from runtime.replica.gradients import Tail, Wishes
from runtime.replica.membership import Member, Severed
from runtime.replica.peers import Reduced
from runtime.replica.rank import FAILURES, NOT_COMPARED, Rank, Unloadable, name_of
from runtime.replica.reporting import Reporter
from runtime.replica.sharing import Sharing
from runtime.replica.siblings import NEXT, Incomplete, Siblings
from runtime.replica.step import MAX_REFUSED_STEPS, NotWhole

#: What a copy of the state is hashed for, in the words in which others are told of it.
HASHED_FOR = ("staged", "compared", "proved")
MAX_TRIES = 8  # checkpoints that fail, before a person has to look
TRIES_OF_ONE = 2  # that fail, until a tier comes after the others
#: So many refusals, the last ones, are in the error that ends the job, and characters of each.
TOLD, MAX_REFUSAL = 3, 300
#: So long, and three times as long as it usually takes and as the interval is, whoever writes alone
#: for all is waited for; as much longer each time, for the store may only be slow.
HANGS_S = 600.0
MAX_UNTOLD = 8  # saves to a tier of which some rank has not told, and perhaps never will


@dataclass(frozen=True)
class Hashed:
    """A copy of one step's state, and what is known of its digest."""

    epoch: int  # in which it was begun
    order: int  # the last that we had from the coordinator then, to get a state
    parts: dict[int, str] = field(default_factory=dict)  # by rank


class AllRanks:
    """Implements `membership.Trainer` on a replica's first rank.

    A step is committed once all ranks have the sum of their parts, a state is held once all hold
    theirs: what fails on one fails on all, and all try anew.
    """

    def __init__(
        self, rank: Rank, siblings: Siblings, reporter: Reporter, *, compare_every: int = 0
    ) -> None:
        """`compare_every`: after so many steps the members' states are compared, 0 for never."""
        self.rank = rank
        self.siblings = siblings
        self.reporter = reporter
        self.member = Member(
            rank.job.replica,
            rank.link.say,
            self,
            placement=rank.job.placement,
            standby=rank.job.standby,
        )
        self.sharing = Sharing()
        self.seen_epoch = 0
        #: our ranks in the folder of all, when the last step was summed
        self._can_share = self._can_write_alone = False
        self._alone_since = 0.0  # monotonic: when it was decided that we write alone for all
        self._passed_on = False  # it was another's turn since ours took too long
        self.epoch_name = ""  # the same on all members, and never used again
        self._trial: Trial | None = None  # of the state that the job began from
        self._tried_since = 0.0  # monotonic
        self._digests: list[str] = []  # of what was loaded just now, by rank
        self._hashed: dict[str, dict[int, Hashed]] = {
            what: {} for what in HASHED_FOR
        }  # by the step
        self._hearing = threading.Lock()
        self._reads = 0  # how many were ordered
        self._refusal: dict[str, Any] = {}  # the first answer to a read that was one
        self._compare_every = compare_every
        self._compared = 0  # after so many times as many steps, or given up
        self._told_late = False
        #: tier -> step -> by rank
        self._saved: dict[str, dict[int, dict[int, CheckpointSaved]]] = {}
        self._common: dict[str, int] = {}  # see `Dispatcher.common`
        self.loaded = False  # see `membership.Trainer`
        rank.saver.dispatcher.on_saved = functools.partial(self.saved, 0)
        rank.saver.dispatcher.on_shared_failed = self.shared_failed
        rank.on_hashed = functools.partial(self.hashed, rank=0)
        siblings.on_failed = self._failed_beside

    def _all(self, op: str, **order: Any) -> list[Any]:
        """Have all ranks do the same; what each returns. Raises Severed, CannotFollow or Unloadable
        if one fails so, once all are done, and Incomplete."""
        self.siblings.tell(op, **order)
        mine = self.rank.obey(op, order)
        self._tell_failed(mine)
        answers = [mine, *self.siblings.answers()]
        failed = [answer for answer in answers if "failed" in answer]
        if failed:
            telling = min(failed, key=lambda answer: [*FAILURES].index(answer["failed"]))
            if refused(telling):  # the others only give up what one refuses
                telling = self._refusal
                raise Unloadable(f"rank {answers.index(telling)}: {telling['text']}")
            raise FAILURES[telling["failed"]](telling["text"])
        return [answer["value"] for answer in answers]

    def _failed_beside(self, answer: dict[str, Any]) -> None:
        """Another rank failed. We and the others may wait for peers whose replicas wait as we do: a
        replica reports that its epoch broke once all its ranks have answered. Or we may still read
        what it cannot. On a thread of its own; no other epoch and no other read begins before that
        answer is read."""
        if broke(answer):
            self.rank.gloo.sever(self.member.epoch)
        self._tell_failed(answer)

    def _tell_failed(self, answer: dict[str, Any]) -> None:
        """To all ranks, which are at the same, in what way it failed on one: that a read is of no
        use once, for all may refuse it."""
        if broke(answer):
            self.siblings.tell("broken", epoch=self.member.epoch)
        elif refused(answer) and self.rank.give_up(self._reads):
            self._refusal = answer
            self.siblings.tell("give_up", number=self._reads)

    # --- a step ---------------------------------------------------------------------------------

    def reduce(self) -> Tail:
        """Sum the step. Raises Severed, and NotWhole if it is to be computed anew."""
        answers = self._all("reduce")
        said, can_share, is_free = zip(*answers, strict=True)
        self._can_share, self._can_write_alone = all(can_share), all(is_free)
        flaws = [flaw for flaw in said if flaw]
        if flaws:
            self._all("refuse", flaw=flaws[0])
            raise NotWhole(
                f"{flaws[0]}; it is computed anew, {MAX_REFUSED_STEPS} times in a row end the "
                "process: see that all replicas read the same data, else look at the memory of "
                "that replica's node"
            )
        assert self.rank.tail is not None  # noqa: S101 - it was summed
        return self.rank.tail

    def commit(self) -> float:
        """Apply the step that all ranks hold: our own, or one that peers made without us. Returns
        by what `judge` judges it, the same on all ranks."""
        made: list[float] = self._all("commit", newcomer=self.member.newcomer)
        odd = next((one for one in made if not math.isfinite(one)), made[0])
        # The loss is that of all ranks, and the weights are each one's own.
        self.rank.state.spoilt |= math.isnan(odd) and not all(map(math.isnan, made))
        return odd

    def ready(self, tiers: Collection[TierName]) -> set[TierName]:
        """Those of these tiers that have finished the save before on all ranks: one that hangs on a
        single rank waits alone, and that rank tells."""
        if not tiers:
            return set()
        return set.intersection(*map(set, self._all("ready", tiers=sorted(tiers))))

    def prepare_save(self, tiers: Collection[TierName] = ()) -> bool:
        """Whether all ranks can save to these at once; they begin to make room."""
        return all(self._all("prepare_save", tiers=sorted(tiers)))

    def save(
        self,
        tiers: Collection[TierName],
        *,
        share: tuple[int, int] | None = None,
        last: bool = False,
    ) -> None:
        """At an edge: a checkpoint in each of these tiers. `share`: which share of how many is
        ours, where all members save now."""
        if "shared" in tiers:
            self._can_share = self._can_write_alone = False
        name = uuid.uuid4().hex[:12] if last else f"{self.epoch_name}x{self.committed}"
        with self._hearing:
            common = {**self._common}
        self._all(
            "save",
            name=name,
            tiers=sorted(tiers),
            share=share or (0, 1),
            last=last,
            common=common,
        )

    def _note_epoch(self) -> None:
        if self.reporter.speaks():
            self.rank.saver.sources.note_epoch(self.member.epoch)

    def saved(self, rank: int, part: CheckpointSaved) -> None:
        """A rank's part is durable; once all are, so is the whole. On a thread of its own."""
        self._note_epoch()  # before the first there was no folder to note it in
        if part.tier in OF_ALL_NODES:  # is told of as a whole
            if part.tier == "shared":
                self.sharing.hear("whole")
            self.rank.job.sender.tell(part)
            return
        with self._hearing:
            of_tier = self._saved.setdefault(part.tier, {})
            parts = of_tier.setdefault(part.step, {})
            parts[rank] = part
            whole = len(parts) == self.siblings.ranks
            untold = [step for step in of_tier if step > part.step or not whole]
            self._saved[part.tier] = {step: of_tier[step] for step in untold[-MAX_UNTOLD:]}
            if whole:
                self._common[part.tier] = part.step
        if not whole:
            return
        size = sum(one.bytes for one in parts.values())
        digest = digest_of_all([parts[one].digest for one in sorted(parts)])
        self.rank.job.sender.tell(
            replace(parts[0], bytes=size, stored=size, digest=digest, at=part.at)
        )

    def can_share(self) -> bool:
        """Whether all our ranks can write their share to the folder of all at the next edge, as far
        as they have said."""
        return self._can_share and self.rank.saver.can_share()

    def can_write_alone(self) -> bool:
        """The same, of all of it while no other replica writes."""
        return self._can_write_alone and self.rank.saver.is_free("shared")

    def begins_alone(self) -> None:
        """It was decided that we write alone for all, from now on."""
        self._alone_since = time.monotonic()

    def passes_on(self) -> bool:
        """Whether what we write alone for all takes so long that our store may hang: then it is
        another's turn, and the rank where it is late tells."""
        if not self.sharing.writes_alone:
            return False
        pace = self.rank.saver.tiers["shared"].pace
        usual_s = max(HANGS_S, 3 * pace.every_s, 3 * (pace.alone_s or 0.0))
        if time.monotonic() - self._alone_since <= usual_s * (1 + self.sharing.turn):
            return False
        self._passed_on = True
        self.sharing.hear("alone_failed")
        self.ready({"shared"})
        return True

    def hear_of_shared(self, wishes: Wishes) -> None:
        """What became of a save to the folder of all, as all members hear it."""
        if wishes.whole:
            self._all("look", save=self.epoch_name)
        elif wishes.alone_failed:
            self._all("forgive", told=not self._passed_on)
            self._passed_on = False

    def shared_failed(self, shared_out: bool) -> None:
        """One of our ranks could not write there. On a thread of its own."""
        self.sharing.hear("share_failed" if shared_out else "alone_failed")

    @property
    def holds_back(self) -> bool:
        """Whether nothing is to be saved: the last step was made of no numbers, or the state that
        the job began from has not shown yet that it trains."""
        if self.rank.losses.odd:
            return True
        return self._trial is not None and time.monotonic() - self._tried_since < HELD_BACK_S

    def judge(self, made: float) -> None:
        """A step that all made, by what `commit` returned. Raises DoesNotTrain on all replicas
        alike."""
        told = self.rank.losses.note(made)
        if self._trial is None:
            if told is not None and self.reporter.speaks():
                self.trouble(*told)
            return
        try:
            self._trial.note(made)
        except DoesNotTrain:
            self.rank.saver.suspect(self._trial.state)
            raise
        if self._trial.over:
            self._trial = None

    # --- membership.Trainer ---------------------------------------------------------------------

    @property
    def committed(self) -> int:
        return self.rank.state.committed

    @property
    def trained_in(self) -> int:
        return self.rank.state.ledger.epoch

    @property
    def held(self) -> Collection[int]:
        return self.rank.engine.held

    def digest(self) -> str:
        digests, self._digests = self._digests or self._all("digest"), []
        return NEXT.join(digests)

    def load(self, holders: list[list[str]]) -> None:
        """The newest checkpoint of which all ranks have their part, if it is of later training than
        what is in memory. A tier of which two fail comes after the others: of one that lost a bit
        the one before is still newer than what a slow tier has.

        Raises ValueError if there are some and none can be loaded, also if one rank alone sees what
        lies where all should: nobody wants to train anew without knowing. (What a disk of ours
        alone has is not there: others may have it whole.)
        """
        self._digests = []
        mine, *others = self._all("checkpoints", holders=holders)
        self.seen_epoch = max(self._all("seen_epoch"))
        there = [found for found in mine if all(found in one for one in others)]
        failed: Counter[str] = Counter()
        why: list[str] = []
        while there and failed.total() < MAX_TRIES:
            step, name, tier = there.pop(0)
            try:
                digests = self._read(name, tier)
            except Unloadable as error:
                why.append(f"{tier}, step {step}: {error}")
            else:
                self._all("load")
                self.loaded = True
                self.rank.saver.sources.loaded(name)
                left = reversed([(step, name, tier), *there])  # of each tier the newest is the last
                with self._hearing:
                    self._common = {t: at for at, _, t in left if t not in OF_ALL_NODES}
                self._compare(step, digests)
                return
            failed[tier] += 1
            what = f"{tier}, step {step}: a part is damaged, or of another run"
            there.sort(key=lambda found: failed[found[2]] >= TRIES_OF_ONE)
            if there:
                what += f"; the next one is {there[0][2]}, step {there[0][0]}"
            self.trouble("checkpoint_refused", what, tier)
        sees = [any(tier in OF_ALL_NODES for *_, tier in found) for found in (mine, *others)]
        if (failed or any(sees)) and self.committed < 0:
            folder = self.rank.saver.folders.shared
            blind = [rank for rank, does in enumerate(sees) if not does]
            if any(sees) and blind:
                why.append(f"ranks {blind} see no checkpoint in {folder}, and others do: mount it")
                self.trouble("checkpoints_out_of_reach", why[-1])
            count = len(mine) or max(map(len, others))
            told = [textwrap.shorten(one, MAX_REFUSAL, placeholder=" …") for one in why[-TOLD:]]
            raise ValueError(
                f"none of the {count} checkpoints of this job can be loaded "
                f"({'; '.join(told) or 'none is seen by all ranks'}): mend that, or to begin anew "
                f"move {folder} away; {WHICH_ARE_WHOLE} {folder}"
            )
        self._all("reload")

    def _read(self, name: str, tier: TierName) -> list[str]:
        """The digests that `Rank.read` returns, by rank. Raises Unloadable once one rank refuses
        it: what the others have not read by then is left, however much that is."""
        self._reads += 1
        parts = self._all("read", name=name, tier=tier, number=self._reads)
        if len({history for history, _digest in parts}) > 1:
            raise Unloadable("its parts are of other runs")
        return [digest for _history, digest in parts]

    def _compare(self, step: int, saved: list[str]) -> None:
        """Whether what trains now is what was saved: who takes back less than it gave away trains
        on with other numbers, and nothing else would show it."""
        self._digests = now = self._all("digest")
        if _unlike(saved, now):  # perhaps only laid out otherwise: other weights are trained now
            now = self._all("digest", as_read=True)
        if flawed := _unlike(saved, now):
            self.trouble(
                "checkpoint_not_restored",
                f"step {step}, ranks {flawed}: after loading, the state is not the one that was "
                "saved: see what load_state_dict of the model, optimizer, schedule or extra does",
            )

    def take(self, step: int, digest: str, donors: list[list[str]]) -> None:
        self._common = {}  # of what we held before
        self.rank.losses, self._trial = Losses(), None  # what it leads to the others know
        self._all("take", step=step, digest=digest, donors=donors)
        self._all("load")
        self.loaded = True

    def follow(self, donors: list[list[str]]) -> None:
        self._all("follow", donors=donors)

    def proven(self) -> None:
        self.reporter.follows()

    def stop_following(self) -> None:
        self._all("stop_following")

    def make(self, reduced: Reduced) -> None:
        self.rank.hold(reduced)
        if reduced.step == self.committed + 1:
            self._all("await_followed")
            self.commit()
            if self.rank.tail is not None and self.rank.tail.wishes.prove:
                self.prove()

    def replay(self, step: int, donors: list[list[str]]) -> None:
        while self.committed < step:
            if self.member.epoch and self.rank.gloo.broken(self.member.epoch):
                raise Severed(f"epoch {self.member.epoch} broke")
            self._all("fetch", donors=donors, epoch=self.member.epoch)
            self.judge(self.commit())

    def connect(self, grant: dict[str, Any]) -> None:
        self.reporter.granted(grant, self.committed, self.member.replica)
        steps = self._all("connect", grant=grant, replica=self.member.replica)
        if len(set(steps)) > 1:
            raise Incomplete(f"the ranks of this replica are at the steps {steps}; start it anew")

    def enter(self, grant: dict[str, Any]) -> None:
        self.put_on_trial(grant)
        self.epoch_name = name_of(grant)
        self.sharing.regrouped()
        self._compared = self._times(self.committed + 1)  # the same on all, who entered or stayed
        self._note_epoch()
        self._all("enter", grant=grant)

    def put_on_trial(self, grant: dict[str, Any]) -> None:
        """The state that the job began from, if that was not long ago."""
        began = grant.get("began") or {"epoch": 0, "step": -1}
        left = TRIAL_STEPS - (self.committed - began["step"])
        if grant["begins"] or (self._trial is None and left > 0):  # also who comes in between
            state = (int(began["epoch"]), int(began["step"]))
            before_s = float(grant["started_at"]) - float(began.get("at", grant["started_at"]))
            self._tried_since = time.monotonic() - max(0.0, before_s)
            self._trial = Trial(state, left) if began["step"] >= 0 else None
            self.rank.losses = Losses()

    def stage(self) -> None:
        self._begin_to_hash("staged")
        self._all("stage")

    def release(self, *, log: bool) -> None:
        self._all("release", log=log)

    def unreached(self, addresses: list[list[str]], try_s: float) -> list[int]:
        by_rank = self._all("unreached", peers=addresses, try_s=try_s)
        return sorted({place for places in by_rank for place in places})

    def forget(self) -> None:
        self._all("forget")

    def heard_of_loss(self, message: dict[str, Any]) -> None:
        self.rank.observer.lost(message)
        self.reporter.lost(message, self.committed)

    def trouble(self, kind: str, text: str, subject: str = "") -> None:
        self.rank.job.trouble(kind, text, subject)

    # --- copies for newcomers -------------------------------------------------------------------

    def ready_to_stage(self) -> bool:
        """Whether there is memory for a copy; begins to make it."""
        if not self.rank.has_room():
            self._all("make_room")
        return self.rank.has_room()

    def hashed(self, op: str, step: int, digest: str, *, rank: int) -> None:
        """A rank hashed its part of a copy, or could make none (""); once all have said so, we do.
        On a thread of its own."""
        if not digest and op == "staged":
            what = f"rank {rank} could make no copy of step {step} for newcomers; its log says why"
            self.trouble("not_staged", what)
        with self._hearing:
            found = self._hashed[op].get(step)
            if found is None:
                return  # another copy took its place
            found.parts[rank] = digest
            if len(found.parts) < self.siblings.ranks:
                return
            del self._hashed[op][step]
        whole = all(found.parts.values())
        digests = NEXT.join(found.parts[one] for one in sorted(found.parts)) if whole else ""
        if whole or op != "compared":  # for which nobody waits
            told = {"epoch": found.epoch, "order": found.order, "step": step, "digest": digests}
            self.rank.link.say(op, **told)

    def _begin_to_hash(self, op: str) -> None:
        """A copy of the state at this edge. Of those before it nobody wants to know any more, but
        of those that are a proof."""
        with self._hearing:
            if op != "proved":
                self._hashed[op].clear()
            begun = Hashed(epoch=self.member.epoch, order=self.member.order)
            self._hashed[op][self.committed] = begun

    # --- comparing ------------------------------------------------------------------------------

    def ready_to_compare(self) -> bool:
        """Whether the states are to be compared after the step under way, and no checkpoint of any
        rank has to wait for the memory of our copy; or so often was that so that one has to."""
        late = self._times(self.committed + 2) - self._compared
        if not self._compare_every or not (late > 0 or self.member.wants_compare):
            return False
        if all(self._all("has_room_to_compare", late=late > 1)):
            return True
        if late > 1 and not self._told_late:
            self._told_late = True
            self.trouble(
                "not_compared",
                f"the replicas' states have not been compared for {late} times "
                f"{self._compare_every} steps: this one has no memory free for a copy, which a "
                "checkpoint to a slow store may hold; training goes on: look why that store is "
                "slow, or save to it less often (every_s)",
            )
        return False

    def ready_to_prove(self) -> bool:
        """Whether newcomers are to be compared with us after the step under way."""
        return self.member.wants_proof and not self.member.wants_stage and self.ready_to_stage()

    def compare(self) -> None:
        """At an edge that all members reached ready for it. Where a rank can make no copy after all
        it is the next time's turn, as for the other replicas."""
        self._compared = self._times(self.committed + 1)
        self._told_late = False
        self.member.wants_compare = False
        self._begin_to_hash("compared")
        for rank, flaw in enumerate(self._all("compare")):
            if flaw:
                where = f"step {self.committed}, rank {rank}"
                self.trouble("not_compared", f"{where}: {flaw}; {NOT_COMPARED}")

    def prove(self) -> None:
        """At the edge after a marked step: the witness and all who follow hash what they hold."""
        self.member.wants_proof = False
        self._begin_to_hash("proved")
        self._all("prove")

    def _times(self, steps: int) -> int:
        return steps // self._compare_every if self._compare_every else 0


def broke(answer: dict[str, Any]) -> bool:
    """Whether a rank answers that the epoch broke there."""
    return "failed" in answer and issubclass(FAILURES[answer["failed"]], Severed)


def refused(answer: dict[str, Any]) -> bool:
    """Whether a rank answers that its part of a checkpoint fails."""
    return "failed" in answer and FAILURES[answer["failed"]] is Unloadable


def _unlike(saved: list[str], now: list[str]) -> list[int]:
    """The ranks whose state has another digest; of what was saved without one nobody knows."""
    pairs = enumerate(zip(saved, now, strict=True))
    return [rank for rank, (before, after) in pairs if before not in ("", after)]
