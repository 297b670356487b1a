"""When to save, and the way of a copy from the training thread to the writer.

The training thread pays for the copying of what it is about to change, at most. A failed save
raises an alarm and never stops the training.
"""

from __future__ import annotations

import json
import logging
import mmap
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from runtime.checkpoint import peer, store
from runtime.checkpoint.facts import facts_of
from runtime.checkpoint.handle import WriterHandle
from runtime.checkpoint.holder import Label
from runtime.checkpoint.peer import Place
from runtime.checkpoint.rooms import Room, Rooms
from runtime.checkpoint.sources import Sources
from runtime.checkpoint.tiers import TIERS, Folders, Interval, Tier, TierName, tiers_of
from runtime.client import CheckpointSaved
from runtime.image import aligned
from runtime.job import Job
from runtime.snapshot import Copying, TooSmall

log = logging.getLogger("drydock.checkpoint")

FINISH_S = 30.0  # how long the end of a job waits for its last checkpoint
#: A copy's progress is told after so many bytes, and so many times at most: what a writer that
#: hangs has not read must fit in its socket.
TOLD_BYTES, TOLD_TIMES = 64 << 20, 16


def _nobody_asks() -> None:
    """Nobody shares a folder with us."""


@dataclass
class Save:
    """One copy on its way to its tiers."""

    name: str
    step: int
    copying: Copying
    room: Room
    asked: float  # monotonic
    begin_s: float  # what the training thread paid at the edge
    replica: int
    epoch: int
    tiers: tuple[Tier, ...]
    share: tuple[int, int]  # of the tiers that all replicas share: which of how many is ours
    #: of which nothing more is heard, and "copy" once none is under way
    ended: set[str] = field(default_factory=set)
    told: int = 0  # bytes of the copy of which the writers know

    def shares(self, tier: Tier) -> int:
        """Among how many it is shared out in this tier."""
        return 1 if tier.own else self.share[1]

    @property
    def stall_s(self) -> float:
        """What the training thread paid in all, once the copy is finished."""
        return self.begin_s + self.copying.waited_s


@dataclass
class Write:
    """One save in one tier."""

    save: Save
    tier: Tier
    life: int = 0  # of the writer that was asked
    durable_s: float = 0.0  # after it was asked; 0.0 as long as it is not
    verified: bool = False

    @property
    def where(self) -> str:
        return f"step {self.save.step}, {self.tier.name}"


class Checkpointer:
    """Saves of one job, to each of its tiers at intervals and when asked."""

    def __init__(
        self,
        job: Job,
        *,
        every_s: Interval | Mapping[str, Interval] = "auto",
        keep: int = store.KEEP,
        failures_per_node_day: float | None = None,
    ) -> None:
        """`every_s`: seconds between two saves, of all tiers or of each by its name ("peer",
        "local", "shared"); "auto" takes what is best by what saves cost and by
        `failures_per_node_day`: None for what the control plane has seen, or was published.
        `keep`: so many are kept in the shared folder. Raises ValueError."""
        self.job = job
        self.tiers = tiers_of(job, every_s, keep, failures_per_node_day)
        self.folders = Folders(job)
        self.sources = Sources(job, self.tiers, self.folders)
        #: called, on a thread of its own, with each one that is durable and verified
        self.on_saved: Callable[[CheckpointSaved], None] = job.sender.tell
        #: called, on a thread of its own, when one in the folder of all failed, or our share of it
        self.on_shared_failed: Callable[[], None] = _nobody_asks
        #: in the folder of all we see what others wrote there
        self.sees_others = False
        self._share_flaw = ""  # why we could not write the last one of ours
        self._last = dict.fromkeys(self.tiers, time.monotonic())
        self._late: set[TierName] = set()  # an engineer was told
        self._failing: set[TierName] = set()  # and of these
        self._under_way: set[TierName] = set()  # a save is
        self._again: set[TierName] = set()  # there was too little room, and more is being made
        #: where states are copied to; copies for newcomers are made in them too
        self.rooms = Rooms(lambda why: job.trouble("no_room_for_checkpoints", why))
        #: one for each tier: a store that hangs holds up no other
        self._writers = {name: WriterHandle(partial(self._hear, name)) for name in self.tiers}
        self._copied: queue.SimpleQueue[Save | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._asked: dict[tuple[TierName, str], Write] = {}  # of the writers, by the save's name
        self._facts = facts_of(job)
        self._own_holder: peer.OwnHolder | None = None  # it keeps what peers save
        self._keeper: Place | None = None  # the holder that keeps what we save
        self._near = False  # an engineer was told that it is no farther than this node

    # --- peers' memory --------------------------------------------------------------------------

    def open_holder(self, host: str) -> dict[str, str]:
        """Start this node's holder unless it runs, to be reached at `host`; how peers are told of
        it, {} if there is none."""
        folder = self.job.holder_dir
        if folder is None:
            return {}
        try:
            self._own_holder = peer.OwnHolder(folder, self.job.name, self.job.token, host)
        except OSError as error:
            self.job.trouble("no_holder", f"peers cannot save to this node's memory: {error}")
            return {}
        self.sources.holder = self._own_holder.address
        return Place(self._own_holder.address, self.job.domain).describe()

    def meet(self, members: Sequence[Mapping[str, Any]], replica: int) -> None:
        """The members of an epoch, as its grant names them: one of them keeps what we save."""
        if "peer" not in self.tiers:
            return
        domain = self.job.domain
        self._keeper = peer.holder_for(members, replica, self.job.rank, domain)
        near = self._keeper is not None and self._keeper.domain == domain
        if near and not self._near:
            text = f"no member is on another node than {domain}: its memory is lost with it"
            self.job.trouble("checkpoint_not_apart", text)
        self._near = near

    # --- saving ---------------------------------------------------------------------------------

    def due(self) -> set[TierName]:
        """The tiers whose interval is over, or whose last save is to be tried again."""
        now = time.monotonic()
        over = [n for n, tier in self.tiers.items() if now - self._last[n] >= tier.pace.every_s]
        return self._again.union(over)

    def agreed(self, tiers: Collection[TierName]) -> None:
        """All members are to save to these now, as soon as each has room: the next save is due an
        interval later, also if we are not the one that writes."""
        now = time.monotonic()
        self._last.update({name: now for name in tiers if name in self.tiers})

    def ready(self, wanted: Collection[TierName]) -> set[TierName]:
        """Those of the wanted tiers that have finished the save before: however long one store
        takes, it never holds both rooms. An engineer is told, once, that one is late."""
        with self._lock:
            late = self._under_way.intersection(wanted)
        self._tell_late(late)
        return set(wanted) - late

    def can_share(self) -> bool:
        """Whether we could write our share of a save to the folder of all at once."""
        with self._lock:
            busy = "shared" in self._under_way
        return self.sees_others and not busy and self.rooms.any_free()

    def look(self, save: str) -> None:
        """One whose name begins so was written to the folder of all: see whether it is there. Its
        writer looks, for that may take long."""
        if self._share_flaw:
            self._failed("shared", self._share_flaw)
        if not self.sees_others:
            folder = str(self.folders.shared)
            self._writers["shared"].tell({"op": "look", "folder": folder, "save": save})

    def prepare(self, size: Callable[[], int], wanted: Collection[TierName] = ()) -> bool:
        """Whether a state can be taken at once. Begins to make room for it and starts the writers,
        so that the first save costs what the others do. `size` tells how many bytes it takes; it is
        asked only if there is no room yet. `wanted`: the tiers that are late if there is none."""
        self._start()
        if not self.rooms.made():
            self.rooms.prepare(size())
            return False
        if self.rooms.any_free():
            return True
        self._tell_late(set(wanted))
        return False

    def _tell_late(self, tiers: set[TierName]) -> None:
        if new := tiers - self._late:
            self._late |= new
            names = ", ".join(sorted(new))
            self.job.trouble(
                "checkpoint_late", f"the store is slower than checkpoints are due: {names}"
            )

    def save(
        self,
        begin: Callable[[memoryview | None], Copying],
        name: str,
        tiers: Collection[TierName] = TIERS,
        *,
        replica: int | None = None,
        epoch: int = 0,
        share: tuple[int, int] = (0, 1),
        last: bool = False,
    ) -> Copying | None:
        """Begin a copy and see that it is written to these tiers; None if there is no room for it,
        which an engineer is told unless more room is being made.

        `begin` begins the copy in the memory that it is given. No step may be applied before the
        copy is finished. `name` is the same on all ranks, and new; `replica` is the number that we
        have by now, `epoch` that of the last step; `share`: which share of how many we write where
        the replicas share a tier out. The `last` one of all waits for room, for FINISH_S.
        """
        asked = time.monotonic()
        wanted = tuple(self.tiers[one] for one in TIERS if one in tiers and one in self.tiers)
        names = {tier.name for tier in wanted}
        if not wanted:
            return None
        self._start()
        if not self.rooms.made():
            self.rooms.prepare(0)  # how much is needed turns out below
        while (room := self.rooms.take(FINISH_S if last else 0.0)) is not None:
            try:
                copying = begin(room.memory)
            except TooSmall as error:
                self.rooms.give_back(room)
                self.rooms.prepare(error.needed)
                self._again |= names
                if not last:
                    return None
                continue
            except Exception as error:  # no checkpoint is worth the training
                self.rooms.give_back(room)
                self._began(names)
                for one in wanted:
                    self._failed(one.name, f"no copy could be made: {error!r}")
                return None
            self._began(names)
            self._late -= names
            paid_s = time.monotonic() - asked
            number = self.job.replica if replica is None else replica
            with self._lock:
                self._under_way |= names
            self._copied.put(
                Save(name, copying.step, copying, room, asked, paid_s, number, epoch, wanted, share)
            )
            return copying
        self.job.trouble("checkpoint_skipped", "the store has not taken the ones before")
        return None

    def finish(self) -> None:
        """Wait until everything handed over is durable or was refused, for FINISH_S at most. What
        is not goes on without us."""
        if self._own_holder is not None:
            self._own_holder.close()
        if self._thread is None:
            return
        self._copied.put(None)
        self._thread.join(FINISH_S)
        end = time.monotonic() + FINISH_S
        left = [
            name
            for name, writer in self._writers.items()
            if self._thread.is_alive() or not writer.close(max(0.0, end - time.monotonic()))
        ]
        if left:
            text = f"not durable after {FINISH_S:g} s: {', '.join(left)}"
            self.job.trouble("checkpoint_unfinished", text)
        self._thread = None
        self.rooms.close()

    def _began(self, tiers: Collection[TierName]) -> None:
        self._last.update(dict.fromkeys(tiers, time.monotonic()))
        self._again.difference_update(tiers)

    # --- on threads of our own ------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._hand_over, name="drydock-saver", daemon=True
            )
            self._thread.start()

    def _hand_over(self) -> None:
        """Give the writers each copy once it is whole."""
        for name, writer in self._writers.items():
            try:
                writer.start()
            except OSError as error:
                self._failed(name, f"no writer: {error}")
        while (save := self._copied.get()) is not None:
            flaws = self._ask_all(save)
            try:
                save.copying.finish(partial(self._pass_on, save))
            except Exception as error:  # without this thread no later save would be written
                for tier in save.tiers:
                    said = {"op": "not_copied", "save": save.name, "error": repr(error)}
                    self._writers[tier.name].tell(said)
            self._let_go(save, "copy")
            for write, flaw in flaws:
                self._end(write, flaw)

    def _ask_all(self, save: Save) -> list[tuple[Write, str]]:
        """Ask the writers to begin: what is copied they may write while more is. With whom that
        failed, and why."""
        flaws = []
        writes = [Write(save, tier) for tier in save.tiers]
        try:
            asked = self._described(save)
        except Exception as error:
            return [(write, repr(error)) for write in writes]
        for write in writes:
            try:
                self._ask(write, asked)
            except Exception as error:
                flaws.append((write, repr(error)))
        return flaws

    def _pass_on(self, save: Save, copied: int) -> None:
        """Tell the writers how far the copy is, now and then: nobody waits for one that hangs."""
        whole = save.copying.table.bytes
        if copied < whole and copied - save.told < max(TOLD_BYTES, whole // TOLD_TIMES):
            return
        save.told = copied
        for tier in save.tiers:
            said = {"op": "copied", "save": save.name, "bytes": copied}
            self._writers[tier.name].tell(said)

    def _described(self, save: Save) -> dict[str, Any]:
        """What any writer is to know of a copy. Raises ValueError if its room has too little."""
        table = save.copying.table
        described = json.dumps({"step": save.step, "save": save.name, **table.describe()}).encode()
        start = aligned(table.bytes, mmap.PAGESIZE)
        if start + len(described) > len(save.room.memory):
            self.rooms.prepare(start + len(described))
            raise ValueError(f"its description has {len(described)} bytes; the next one has room")
        save.room.memory[start : start + len(described)] = described
        return {
            "op": "save",
            "room": save.room.number,
            "image": table.bytes,
            "described": len(described),
            "step": save.step,
            "save": save.name,
            "facts": {**self._facts, "epoch": save.epoch, "at": round(time.time(), 3)},
        }

    def _ask(self, write: Write, asked: dict[str, Any]) -> None:
        tier, save = write.tier, write.save
        if tier.name == "peer":
            place = self._to_peer(save, int(asked["image"]))
        else:
            place = self._to_folder(tier, save)

        def stamp(life: int) -> None:
            write.life = life
            with self._lock:
                self._asked[tier.name, save.name] = write

        self._writers[tier.name].send({**asked, **place}, self.rooms.descriptors(), stamp)

    def _to_folder(self, tier: Tier, save: Save) -> dict[str, Any]:
        return {
            "folder": str(self.folders.to_write(tier, save.replica)),
            "keep": tier.keep,
            "rank": 0 if tier.own else self.job.rank,
            "ranks": 1 if tier.own else self.job.ranks,
            "share": 0 if tier.own else save.share[0],
            "shares": save.shares(tier),
        }

    def _to_peer(self, save: Save, size: int) -> dict[str, Any]:
        if self._keeper is None:
            raise OSError("no member of this job has a holder")
        label = Label(
            run=self.folders.run(),
            rank=self.job.rank,
            ranks=self.job.ranks,
            step=save.step,
            save=f"{save.epoch}-{save.step}",  # all replicas have this state, and one name for it
            epoch=save.epoch,
            bytes=size,
        )
        return {"holder": self._keeper.address, "token": self.job.token, "label": vars(label)}

    def _hear(self, tier: TierName, message: dict[str, Any]) -> None:
        """What a writer says."""
        with self._lock:
            writes = {name: one for (where, name), one in self._asked.items() if where == tier}
        if message["op"] == "died":
            for write in writes.values():
                if write.life == message["life"]:
                    self._end(write, f"the writer died with status {message['code']}")
        elif message["op"] == "seen":
            self.sees_others = True
        elif message["save"] in writes:
            self._hear_of(writes[message["save"]], message)

    def _hear_of(self, write: Write, message: dict[str, Any]) -> None:
        if message["op"] == "alarm":
            self.job.trouble(message["kind"], f"{write.where}: {message['text']}")
        elif message["op"] == "durable":
            write.durable_s = time.monotonic() - write.save.asked
        elif message["op"] == "verified":
            write.verified = True
            self._tell(write, message["whole"])
        elif message["op"] == "failed":
            self._failed_write(write, str(message["error"]))
        elif message["op"] == "given_up":
            self._shared_failed(write)
        elif message["op"] == "done":
            self._end(write, "")

    def _failed(self, tier: TierName, why: str, shares: int = 1) -> None:
        """One alarm, however often it fails until it is well again. What others have shares in is
        tried again by one alone: only if that succeeds is it ours that is wrong."""
        if shares > 1:
            self._share_flaw = why
            log.warning("share_failed error=%s", why)
            return
        with self._lock:
            new = tier not in self._failing
            self._failing.add(tier)
        log.warning("checkpoint_failed tier=%s error=%s", tier, why)
        if new:
            self.job.trouble("checkpoint_failed", why, tier)

    def _is_well(self, tier: TierName) -> None:
        if tier == "shared":
            self._share_flaw = ""
        with self._lock:
            again = tier in self._failing
            self._failing.discard(tier)
        if again:
            self.job.trouble("checkpoint_recovered", "checkpoints are durable again", tier)

    def _tell(self, write: Write, whole: dict[str, Any] | None) -> None:
        """What we wrote was read back, and with it, perhaps, the `whole` checkpoint."""
        self._is_well(write.tier.name)
        pace = write.tier.pace
        pace.note(write.save.stall_s, write.durable_s, write.save.shares(write.tier))
        if whole is None:
            return
        self.sees_others |= not write.tier.own
        self.on_saved(
            CheckpointSaved(
                step=write.save.step,
                tier=write.tier.name,
                path=whole["path"],
                bytes=whole["bytes"],
                digest=whole["digest"],
                stall_s=write.save.stall_s,
                seconds=write.durable_s,
                every_s=pace.every_s,
                ettr=pace.ettr,
                at=time.time(),
            )
        )

    def _failed_write(self, write: Write, why: str) -> None:
        save = write.save
        self._failed(write.tier.name, f"step {save.step}: {why}", save.shares(write.tier))
        self._shared_failed(write)

    def _shared_failed(self, write: Write) -> None:
        if not write.tier.own:
            self.sees_others = False
            self.on_shared_failed()

    def _end(self, write: Write, error: str) -> None:
        """Nothing more is heard of it."""
        save = write.save
        with self._lock:
            self._asked.pop((write.tier.name, save.name), None)
            if write.tier.name in save.ended:
                return
            self._under_way.discard(write.tier.name)
        if error and not write.verified:
            self._failed_write(write, error)
        self._let_go(save, write.tier.name)

    def _let_go(self, save: Save, what: str) -> None:
        """Once nothing is under way with its room any more it is given back: once, for it may be in
        use again."""
        with self._lock:
            last = what not in save.ended and len(save.ended) == len(save.tiers)
            save.ended.add(what)
        if last:
            self.rooms.give_back(save.room)
