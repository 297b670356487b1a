"""This process's part of its replica: what is done with it when the replica's membership changes.

A replica of several ranks does all of this on each of them at once, each with its own part of the
state, and with the ranks of its number in other replicas. The first decides; see `lead`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from runtime.background import in_background
from runtime.checkpoint import Checkpointer
from runtime.checkpoint.compression import NotInstalled
from runtime.checkpoint.resharding import AS_SAVED, has_parts, resharded
from runtime.checkpoint.saver import FINISH_S
from runtime.checkpoint.suspects import Losses
from runtime.checkpoint.tiers import TIERS, TierName
from runtime.framing import PeerFailed
from runtime.image import Damaged, Table
from runtime.job import Job
from runtime.priority import lower_priority
from runtime.replica.fetching import Follower, fetch_reduced, fetch_state
from runtime.replica.gradients import Tail, Wishes
from runtime.replica.link import Link
from runtime.replica.membership import CannotFollow, Severed, Silent
from runtime.replica.nccl import EpochGroup
from runtime.replica.observing import Observer
from runtime.replica.pacing import pace_of
from runtime.replica.peers import PeerServer, Reduced, ReducedLog
from runtime.replica.preemption import Preemption, durable_in, in_time, longest_s, usual_s_in
from runtime.replica.reach import unreached
from runtime.replica.reporting import Committed
from runtime.replica.siblings import NEXT
from runtime.replica.state import TrainingState
from runtime.replica.step import Applied, StepEngine
from runtime.snapshot import Copying, TooSmall, state_of, touched
from runtime.stalls import Stalls

log = logging.getLogger("drydock.replica")

#: What is no larger who follows hashes where it lies, which takes a tenth of a second: to copy it
#: into new memory costs several times that of the processors that the members train on. Of what is
#: larger it makes a copy, so as not to fall behind.
IN_PLACE_BYTES = 1 << 30
#: Behind what failed.
NOT_COMPARED = (
    "training goes on, and states are compared the next time; if it fails for want of memory free "
    "some on this node, or raise its limit"
)
FOLLOWED_S = 5.0  # how long one rank may be later than the first with a step that all follow


class Unloadable(RuntimeError):
    """A checkpoint of which the part of one rank fails, and with it those of all."""


#: What may go wrong on one rank and is then wrong with the replica, by its name on the wire; what
#: tells most first.
FAILURES: dict[str, type[RuntimeError]] = {
    "silent": Silent,
    "severed": Severed,
    "cannot_follow": CannotFollow,
    "unloadable": Unloadable,
}


def name_of(grant: Mapping[str, Any]) -> str:
    """An epoch's, the same on all members and never used again: epochs are counted anew if lost."""
    return f"{grant['epoch']}x{round(float(grant['started_at']) * 1e3):x}"


_orders: set[str] = set()
_Method = TypeVar("_Method", bound=Callable[..., Any])


def order(method: _Method) -> _Method:
    """What the first rank of a replica may order the others to do."""
    _orders.add(method.__name__)
    return method


class Rank:
    """Obeys; decides nothing that another rank could decide otherwise."""

    def __init__(
        self,
        job: Job,
        state: TrainingState,
        engine: StepEngine,
        gloo: EpochGroup,
        saver: Checkpointer,
        observer: Observer,
        *,
        host: str,
        on_step: Callable[[Committed], None] | None,
        stalled_after_s: float = 0.0,
    ) -> None:
        """`stalled_after_s`: see `Stalls`."""
        self.job = job
        self.host = host
        self.state = state
        self.engine = engine
        self.gloo = gloo
        self.saver = saver
        saver.open_holder(host)
        self.link: Link  # to the coordinator, or to the first rank: given by the loop
        self.observer = observer
        engine.warn = partial(job.trouble, "weights_written")
        self.on_step = on_step
        self.replica = job.replica
        self.tail: Tail | None = None  # of the last step that was summed or fetched
        self.wishes = Wishes()  # for the next step that is summed
        #: called with each step that we made together with others
        self.tell: Callable[[Committed], None] = lambda _step: None
        self._members: list[int] = []
        self._epoch, self._epoch_number = "", 0  # its name, see `name_of`
        self._reduced: Reduced | None = None  # summed or fetched, and not yet applied
        self._kept = ReducedLog()
        #: called on a thread of its own once our part of a copy was hashed, with what it is for,
        #: its step and digest; "" if there is no copy after all
        self.on_hashed: Callable[[str, int, str], None] = self._say_hashed
        self._server = PeerServer(
            host,
            job.token,
            self._kept,
            lambda step, digest: self.on_hashed("staged", step, digest),
            pace_of(job.rate_cap),
        )
        self._read: dict[str, Any] | None = None  # a state
        self._read_as: Table | None = None  # how that lay, once our part was read as it is
        self._given_up = 0  # the last read of which another rank says that it is of no use
        self._follower: Follower | None = None
        self._passed_on: Follower | None = None  # who gave us the step that is held
        self._stopped: Follower | None = None  # what it fetched last may be the next step
        gradients = engine.gradients
        #: for steps that peers made, which are as large as ours, where those are in this memory
        self._pool = gradients.pool if gradients.device.type == "cpu" else None
        self._followed: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        #: held by whoever changes the state, or begins a copy of it
        self._changing = threading.Lock()
        self._torn = False  # a step was applied in part: what is held is no state
        self.losses = Losses()  # on the first rank of a replica, which judges them
        self.stalls = Stalls(job.trouble, stalled_after_s)
        self.preemption = Preemption(job.grace_s, self._save_takes_s, self.save_aside)
        self._copies: list[Copying] = []  # under way, for newcomers and checkpoints
        #: for the next copy for newcomers if all copy buffers are in use, once it was asked for
        self._spare_room: Future[memoryview | None] | None = None

    @property
    def address(self) -> str:
        """Where peers reach us."""
        return self._server.address

    @property
    def holder(self) -> dict[str, str]:
        """Of this node, as peers are told of it."""
        return self.saver.holder

    def obey(self, op: str, given: dict[str, Any]) -> dict[str, Any]:
        """Carry out an order; what it returned, or in which of the expected ways it failed."""
        if op not in _orders:
            raise ValueError(f"the first rank orders {op!r}, which is not known here")
        try:
            return {"value": getattr(self, op)(**given)}
        except (Severed, CannotFollow, Unloadable) as error:
            names = {kind: name for name, kind in FAILURES.items()}
            return {"failed": names[type(error)], "text": str(error)}

    def close(self) -> None:
        self.stalls.close()
        self.preemption.close()
        self.stop_following()
        self.gloo.close()
        self._server.close()

    # --- a newcomer -----------------------------------------------------------------------------

    @order
    def checkpoints(self, holders: list[list[str]]) -> list[list[Any]]:
        """The steps, names and tiers of the checkpoints that are there, of training later than
        ours; see `Sources.saves`. `holders`: of other nodes, one for each rank."""
        ours = (self.state.ledger.epoch, self.state.committed)
        alike = [one for one in holders if len(one) == self.job.ranks]  # others are cut otherwise
        elsewhere = dict.fromkeys(one[self.job.rank] for one in alike)
        return [[*found] for found in self.saver.sources.saves(elsewhere, ours)]

    @order
    def seen_epoch(self) -> int:
        """The latest of which a checkpoint is there, or anything else tells."""
        return self.saver.sources.latest_epoch

    @order
    def read(self, name: str, tier: TierName, number: int) -> list[str]:
        """Read and verify our part of a checkpoint: what was trained up to it, and its digest. No
        digest if no part is ours as it is: other ranks saved it, or another tool. Raises Unloadable
        if it fails, or is given up by its `number`, which is higher each time; NotInstalled."""
        self._read = self._read_as = None
        sources, rank, ranks = self.saver.sources, self.job.rank, self.job.ranks
        digest = ""

        def go_on(_bytes: int) -> None:
            if self._given_up >= number:
                raise Unloadable("another rank refused it")

        try:
            saved = sources.ranks(name, tier, progress=go_on)
            if saved == ranks:
                staged = sources.read(name, tier, rank, progress=go_on)
                self._read, digest = state_of(staged), staged.digest
                self._read_as = staged.table
                if ranks == 1 and not self.state.shard_group.divided and has_parts(self._read):
                    # It was divided among as many as one.
                    self._read, digest = resharded(lambda _rank: staged, 1, 0, 1), ""
                if "ledger" not in self._read:  # weights alone, that another tool made
                    digest = ""
            else:
                part = partial(sources.read, name, tier, progress=go_on)
                self._read = resharded(part, saved, rank, ranks)
            if AS_SAVED in self._read:  # it may have no ledger, and is not of weights alone
                raise Damaged("a runtime.WholeJob saved it, and no ReplicaGroup can go on from it")
        except NotInstalled:
            raise  # nothing is wrong with it, and what is older must not take its place
        except (Damaged, OSError) as error:
            self._read = None
            self.job.trouble("checkpoint_refused", f"{tier}: {error}", tier)
            raise Unloadable(str(error)) from error
        return [history_of(self._read), digest]

    def give_up(self, number: int) -> bool:
        """A rank refuses what that read is to get: it ends at its next block. Whether that was not
        known yet. On any thread."""
        known, self._given_up = self._given_up, max(self._given_up, number)
        return known < number

    @order
    def load(self) -> None:
        """Replace our part of the state by the one that was read or taken."""
        if self._read is None:
            raise RuntimeError("no state was read or taken")
        with self._changing:
            self.await_copies(whole=True)
            self.state.restore(self._read)
        if self.state.data_changed:
            self.job.trouble("data_changed", self.state.data_changed)
        self.engine.trained.at_edge()
        self._read = self._stopped = None
        self._kept.clear()
        self.link.step = self.state.committed

    @order
    def reload(self) -> None:
        """Begin with what is in memory."""
        self.await_copies(whole=True)
        self._read = self._stopped = None
        self.state.statistics.reload()

    @order
    def digest(self, *, as_read: bool = False) -> str:
        """Of our part of the state, at an edge; `as_read`: were it laid out as what was read last,
        whatever is trained by now."""
        return self.state.digest(ledger=True, laid_out=self._read_as if as_read else None)

    @order
    def take(self, step: int, digest: str, donors: list[list[str]]) -> None:
        """Fetch our part of the state that peers hold ready. Raises CannotFollow."""
        self.observer.at("sync", self.engine.pending)
        self.await_copies(whole=True)
        self._read = self._stopped = None
        try:
            part = digest.split(NEXT)[self.job.rank]
            self._read = state_of(fetch_state(self._ours(donors), self.job.token, step, part))
        except (PeerFailed, Damaged) as error:
            raise CannotFollow(str(error)) from error

    @order
    def follow(self, donors: list[list[str]]) -> None:
        """Begin to hear of the steps that peers commit."""
        self.stop_following()
        if self.state.proof_size() > IN_PLACE_BYTES:
            self._make_spare_room(self.state.proof_size())
        shuffled = self._ours(donors)
        random.Random(os.getpid()).shuffle(shuffled)  # noqa: S311 - spreads the load
        self._followed, self._reduced = queue.SimpleQueue(), None
        step = self.engine.pending
        former, self._stopped = self._stopped, None
        ahead = None if former is None else former.drawn(step)
        heard = self._hear_followed if self.job.rank else self.link.inbox.put
        self._follower = Follower(
            shuffled, self.job.token, step, heard, pool=self._pool, ahead=ahead
        )

    @order
    def stop_following(self) -> None:
        if self._follower is not None:
            self._follower.stop()
            self._stopped, self._follower = self._follower, None
            self._spare_room = None  # it is too small for anything else

    @order
    def await_followed(self) -> None:
        """Hold the step that the first rank has just heard of. Raises CannotFollow."""
        while self._reduced is None:  # what came to an end before is not waited for
            try:
                heard = self._followed.get(timeout=FOLLOWED_S)
            except queue.Empty as error:
                raise CannotFollow("this rank heard of no step") from error
            if heard["op"] == "made":
                self.hold(heard["reduced"])
            elif heard["op"] == "cannot_follow":
                raise CannotFollow(str(heard["error"]))

    def hold(self, reduced: Reduced) -> None:
        """A step that peers made and that we heard of, to be committed next if it is the next."""
        if reduced.step == self.engine.pending:
            self._hold(reduced)
            self._passed_on = self._follower
        elif self._follower is not None:
            self._follower.applied(reduced.step)

    def _hear_followed(self, message: dict[str, Any]) -> None:
        """On the follower's thread. That there is nothing new, the first rank hears for all."""
        if message["op"] != "up_to_date":
            self._followed.put(message)

    def _hold(self, reduced: Reduced) -> None:
        gradients = self.engine.gradients
        self.tail = gradients.read(reduced.buffer)
        moved = reduced.buffer.to(gradients.device)
        self._reduced = reduced if moved is reduced.buffer else replace(reduced, buffer=moved)

    @order
    def fetch(self, donors: list[list[str]], epoch: int = 0) -> None:
        """Hold the next step, which peers made. `epoch`: of which we are a member; all wait for our
        report if it breaks. Raises CannotFollow, and Severed if it broke meanwhile."""
        ours = deque(self._ours(donors))
        ours.rotate(-self.replica)  # others who are behind ask other donors first
        step = self.engine.pending

        def broken() -> bool:
            return epoch > 0 and self.gloo.broken(epoch)

        have = None if self._stopped is None else self._stopped.drawn(step, ours, broken)
        try:
            self._hold(fetch_reduced(ours, self.job.token, step, have, self._pool, broken))
        except PeerFailed as error:
            if broken():
                raise Severed(f"epoch {epoch} broke") from error
            raise CannotFollow(str(error)) from error

    # --- a member -------------------------------------------------------------------------------

    @order
    def connect(self, grant: dict[str, Any], replica: int) -> int:
        """Begin to build the epoch's group, which is needed at the end of a step. Raises Severed if
        the epoch breaks meanwhile. Returns our last step, which must be that of all ranks."""
        self.replica = replica
        self._members = [int(m["replica"]) for m in grant["members"]]
        self._epoch, self._epoch_number = name_of(grant), int(grant["epoch"])
        self.saver.meet(grant["members"], replica)
        addresses = [str(m["gloo"][self.job.rank]) for m in grant["members"]]
        self.gloo.build(self.link, int(grant["epoch"]), addresses, self._members.index(replica))
        return self.state.committed

    @order
    def enter(self, grant: dict[str, Any]) -> None:
        """Take up an epoch whose state is held: who computes what."""
        self._stopped, self._followed = None, queue.SimpleQueue()
        began = grant.get("began") or {}
        self.saver.dispatcher.began = began if "first" in began else {}  # an older coordinator's
        self.engine.enter(int(grant["epoch"]), self.replica, self._members, grant)
        log.info("entered epoch=%s members=%s", grant["epoch"], self._members)
        self.observer.granted(grant)

    @order
    def reduce(self) -> tuple[str, bool, bool]:
        """Sum the step over all members; in which way the sum is not the step, and whether we could
        write to the folder of all: a share, or a part alone. Raises Severed."""
        self._reduced, self.tail = self.engine.reduce(self.wishes)
        saver = self.saver
        return self.engine.flaw(self.tail), saver.can_share(), saver.is_free("shared")

    @order
    def refuse(self, flaw: str) -> None:
        """Compute the step anew. Raises RuntimeError if that was done too often."""
        self.engine.refuse(flaw)

    @order
    def commit(self, *, newcomer: bool) -> float:
        """Apply the step that is held; as a `newcomer`, one that others made. Returns its loss, of
        all ranks, or NaN once gradients that were no numbers have spoilt the weights."""
        reduced, tail = self._reduced, self.tail
        if reduced is None or tail is None:
            raise RuntimeError("no step is held to be committed")
        self._reduced = None
        with self.stalls.computing(counts=False):  # also what the script does after each step
            applied = self._commit(reduced, tail, newcomer=newcomer)
        return math.nan if self.state.spoilt else applied.loss

    def _commit(self, reduced: Reduced, tail: Tail, *, newcomer: bool) -> Applied:
        with self._changing:
            self.await_copies()
            self._torn = True
            applied = self.engine.apply(reduced, tail)
            if not math.isfinite(applied.grad_norm):
                self.state.look_for_spoilt()
            self._torn = False
        if self._passed_on is not None:
            self._passed_on.applied(reduced.step)
            self._passed_on = None
        self._kept.add(reduced)
        self.link.step = self.state.committed
        if newcomer:
            return applied
        step = Committed(
            step=reduced.step,
            epoch=reduced.epoch,
            loss=applied.loss,
            grad_norm=applied.grad_norm,
            samples=applied.samples,
            at=time.time(),
            coverage=tail.coverage,
            computed=tail.computed,
            members=sorted(self._members),
        )
        self.tell(step)
        self.observer.committed(step)
        if self.on_step is not None:
            self.on_step(step)
            with self._changing:
                self.state.note_weights()  # as the script leaves them they are the edge's
        return applied

    @order
    def look(self, *, save: str) -> None:
        """One whose name begins so was written to the folder of all; see whether we see it."""
        self.saver.dispatcher.look(save)

    @order
    def forgive(self, *, told: bool) -> None:
        """Not even one alone could write to the folder of all; see `Dispatcher.forgive`."""
        self.saver.dispatcher.forgive(told=told)

    @order
    def ready(self, *, tiers: list[TierName]) -> list[TierName]:
        """Those of these tiers that have finished our save before; of the others we tell that they
        are late."""
        return sorted(self.saver.ready(tiers))

    @order
    def prepare_save(self, *, tiers: list[TierName]) -> bool:
        """Whether our part can be saved to these tiers at once; begins to make room for it."""
        return self.saver.prepare(self.state.size, tiers)

    @order
    def save(
        self,
        *,
        name: str,
        tiers: list[TierName],
        share: list[int],
        last: bool,
        common: dict[TierName, int],
    ) -> None:
        """Begin a copy of our part, for the writer. `common`: see `Dispatcher.common`."""
        self.saver.dispatcher.common = common
        if last:
            self.preemption.edge()
        ours, shares = share
        with self._changing:
            self._save(self.state.begin_copy, name, tiers, share=(ours, shares), last=last)

    def save_aside(self) -> None:
        """The same, in the middle of anything, on a thread of its own: to the tiers that will be
        durable before we are killed. All ranks of a replica do it each for itself. It fails while
        the script has other weights in the model."""
        self.saver.copy_buffers.await_free(FINISH_S)  # before the lock: an edge may come meanwhile
        with self._changing:
            leads_nowhere = self.losses.lost or self.state.spoilt
            if self._torn or self.preemption.is_over() or leads_nowhere:
                return
            epoch, step = self.state.ledger.epoch, self.state.committed
            if not self._members or step < 0:
                return  # what we hold others hold too, or nobody has trained anything
            speaks = self.replica == min(self._members)
            tiers = self.saver.tiers
            ours = [one for one in TIERS if one in tiers and (speaks or tiers[one].own)]
            in_time = durable_in(usual_s_in(self.saver, ours), self.preemption.left_s())
            # Not by the epoch of the step alone: who was told to end before the next step of it
            # may have saved it, and be told again.
            name = f"stop{epoch}x{step}x{self._epoch}"
            self._save(self.state.begin_copy_aside, name, in_time, last=True)

    def _save_takes_s(self) -> float:
        return longest_s(usual_s_in(self.saver, self.saver.tiers), self.preemption.grace_s)

    def in_time(self, tiers: Collection[TierName]) -> set[TierName]:
        """Those of these to which a last save goes before we are killed."""
        return in_time(tiers, usual_s_in(self.saver, tiers), self.preemption.left_s())

    def _save(
        self,
        begin: Callable[[memoryview | None], Copying],
        name: str,
        tiers: Collection[TierName],
        *,
        share: tuple[int, int] = (0, 1),
        last: bool,
    ) -> None:
        copying = self.saver.save(
            begin,
            name,
            tiers,
            replica=self.replica,
            epoch=self.state.ledger.epoch,
            share=share,
            last=last,
        )
        if copying is not None:
            self._copies.append(copying)

    @order
    def make_room(self) -> None:
        """Begin to make memory for a copy for newcomers, unless there is some: never at the price
        of waiting for a store that takes no checkpoint."""
        copy_buffers = self.saver.copy_buffers
        if self.has_room() or self._spare_room is not None:
            return
        try:
            size = self.state.size()
        except Exception:  # so does the copy, which tells why
            size = 0
        if copy_buffers.made() or not copy_buffers.prepare(size):
            self._make_spare_room(size)

    def _make_spare_room(self, size: int) -> None:
        if self.has_room() or self._spare_room is not None:
            return
        buffer: Future[memoryview | None] = Future()
        try:
            threading.Thread(
                target=self._touch, args=(buffer, size), name="drydock-copy", daemon=True
            ).start()
        except RuntimeError as error:  # no more threads: a later step tries again
            log.warning("no_room_made error=%s", error)
        else:
            self._spare_room = buffer

    def has_room(self) -> bool:
        """Whether there is memory for a copy."""
        spare = self._spare_room
        return self.saver.copy_buffers.any_free() or (spare is not None and spare.done())

    @order
    def stage(self) -> None:
        """At an edge: hold a copy of our part ready for newcomers, and say so."""
        try:
            copying, gone = self._begin_copy(self.state.begin_copy)
        except Exception:  # no newcomer is worth the training
            log.exception("not_staged step=%s", self.state.committed)
            self.on_hashed("staged", self.state.committed, "")
            return
        self._server.offer(copying, gone)

    @order
    def prove(self) -> None:
        """At an edge: hash what of our part others have to hold too, and say so."""
        try:
            if self._follower is not None and self.state.proof_size() <= IN_PLACE_BYTES:
                self.on_hashed("proved", self.state.committed, self.state.proof())
                return
            copying, gone = self._begin_copy(self.state.begin_proof)
        except Exception as error:  # no proof is worth the training
            what = f"step {self.state.committed}: the state could not be hashed: {error!r}"
            self.job.trouble("not_compared", f"{what}; {NOT_COMPARED}")
            self.on_hashed("proved", self.state.committed, "")
            return
        in_background("drydock-prove", partial(self._hash, "proved", copying, gone))

    def _begin_copy(
        self, begin: Callable[[memoryview | None], Copying]
    ) -> tuple[Copying, Callable[[], None]]:
        """In a room that is free, or other memory; and what to call once that is not used."""
        buffer = self.saver.copy_buffers.take()
        memory, gone = self._spare(), _nothing
        if buffer is not None:
            memory, gone = buffer.memory, partial(self.saver.copy_buffers.give_back, buffer)
        try:
            copying = begin(memory)
        except TooSmall:  # an optimizer made its state since
            gone()
            gone, copying = _nothing, begin(None)
        except BaseException:
            gone()
            raise
        self._copies.append(copying)
        return copying, gone

    @order
    def has_room_to_compare(self, *, late: bool) -> bool:
        """Whether there is memory for a copy, and for a checkpoint beside it, which is to wait only
        if the comparison is `late`."""
        copy_buffers = self.saver.copy_buffers
        return copy_buffers.all_free() or (late and copy_buffers.any_free())

    @order
    def compare(self) -> str:
        """At an edge: hash a copy of our part, to be compared with the other replicas', and say
        so. Why that cannot be, in words; "" if it can."""
        if (buffer := self.saver.copy_buffers.take()) is None:
            return "another copy has just taken the memory"
        try:
            copying = self.state.begin_comparison(buffer.memory)
        except Exception as error:  # no comparison is worth the training
            self.saver.copy_buffers.give_back(buffer)
            return f"no copy could be made: {error!r}"
        self._copies.append(copying)
        gone = partial(self.saver.copy_buffers.give_back, buffer)
        in_background("drydock-compare", partial(self._hash, "compared", copying, gone))
        return ""

    def _hash(
        self, op: str, copying: Copying, gone: Callable[[], None], low_priority: bool
    ) -> None:
        try:
            digest = copying.finish(low_priority=low_priority).digest
        except Exception as error:
            what = f"step {copying.step}: the state could not be hashed: {error!r}"
            self.job.trouble("not_compared", f"{what}; {NOT_COMPARED}")
            digest = ""
        finally:
            gone()
        self.on_hashed(op, copying.step, digest)

    def await_copies(self, *, whole: bool = False) -> None:
        """Before a step is applied: wait until what it changes is copied. `whole`: until all is,
        before the state is replaced."""
        for copying in self._copies:
            copying.wait(whole=whole)
        self._copies = [one for one in self._copies if not one.finished.is_set()]

    @order
    def release(self, *, log: bool) -> None:
        """Nobody takes the copy any more; with `log`, nobody follows either."""
        self._spare_room = None
        self._server.release(log=log)

    @order
    def unreached(self, peers: list[list[str]], try_s: float) -> list[int]:
        """The places of those whose machines do not answer this rank's."""
        return unreached(self._ours(peers), try_s)

    @order
    def forget(self) -> None:
        """What was computed of the next step is not wanted: we are no member any more."""
        self._members, self._stopped = [], None
        self._server.release(log=True)  # whoever still takes our copy has others
        if self._follower is None:
            self._followed = queue.SimpleQueue()
        self.engine.forget()

    def _ours(self, donors: list[list[str]]) -> list[str]:
        """Of each donor's ranks the one that holds the same part."""
        return [addresses[self.job.rank] for addresses in donors]

    def _spare(self) -> memoryview | None:
        """Memory that was made because no room was free, once."""
        spare, self._spare_room = self._spare_room, None
        return spare.result() if spare is not None and spare.done() else None

    def _touch(self, buffer: Future[memoryview | None], size: int) -> None:
        lower_priority()
        try:
            buffer.set_result(touched(size))
        except (MemoryError, OSError, RuntimeError) as error:  # by whoever was asked for it
            self.job.trouble(
                "no_room_for_newcomers",
                f"{size} bytes for a copy of the state, by which newcomers are let in, cannot be "
                f"had: {error!r}; training goes on, and it is tried again: free memory on this "
                "node, or raise its limit",
            )
            buffer.set_result(None)

    def _say_hashed(self, op: str, step: int, digest: str) -> None:
        self.link.say(op, step=step, digest=digest)


def _nothing() -> None:
    """Memory of its own is given back by itself."""


def history_of(state: Mapping[str, Any]) -> str:
    """What was trained up to a state, and in which epochs: alike in all parts of one checkpoint."""
    return hashlib.sha256(json.dumps(state.get("ledger")).encode()).hexdigest()
