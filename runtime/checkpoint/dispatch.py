"""Hands copies from the training thread to the writers, and follows what becomes of them.

A failed save raises an alarm and never stops the training.
"""

from __future__ import annotations

import json
import logging
import mmap
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from runtime.checkpoint.copy_buffers import CopyBuffer, CopyBuffers
from runtime.checkpoint.facts import facts_of
from runtime.checkpoint.peer import Keepers
from runtime.checkpoint.tiers import Folders, Tier, TierName
from runtime.checkpoint.writer_handle import WriterHandle
from runtime.client import CheckpointSaved
from runtime.image import aligned
from runtime.job import Job
from runtime.snapshot import Copying

log = logging.getLogger("drydock.checkpoint")

#: A copy's progress is told after so many bytes, then more and more rarely, about so many times in
#: all: what a writer that hangs has not read must fit in its socket.
TOLD_BYTES, TOLD_TIMES = 8 << 20, 32
#: Looks for what others wrote, in vain, until an engineer is told: a network file system may show
#: it later.
UNSEEN = 3
#: So many saves to memory at most may still turn out to be there of every rank.
AWAITED = 8


#: What a save tells of the state that its job began from.
_BEGAN = ("epoch", "step", "first")


def _nobody_asks(_shared_out: bool) -> None:
    """Nobody shares a folder with us."""


def _nobody_looks() -> None:
    """It is the same to us who keeps ours."""


@dataclass
class Save:
    """One copy on its way to its tiers."""

    name: str
    step: int
    copying: Copying
    buffer: CopyBuffer
    asked: float  # monotonic
    begin_s: float  # what the training thread paid at the edge
    replica: int
    epoch: int
    tiers: tuple[Tier, ...]
    share: tuple[int, int]  # of the tiers that all replicas share: which of how many is ours
    #: of which nothing more is heard, and "copy" once none is under way
    ended: set[str] = field(default_factory=set)
    told: int = 0  # bytes of the copy of which the writers know
    #: the writers that could not be asked, and why; None before they are
    flaws: list[tuple[Write, str]] | None = None

    def shares(self, tier: Tier) -> int:
        """Among how many it is shared out in this tier."""
        return self.share[1] if tier.shared_out else 1

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
    failed: bool = False
    alarms: set[str] = field(default_factory=set)

    @property
    def where(self) -> str:
        return f"step {self.save.step}, {self.tier.name}"


class Dispatcher:
    """Hands each copy to a writer for each of its tiers, and hears what they say."""

    def __init__(
        self, job: Job, tiers: Mapping[TierName, Tier], folders: Folders, copy_buffers: CopyBuffers
    ) -> None:
        self._job = job
        self._folders = folders
        self._copy_buffers = copy_buffers
        #: called, on a thread of its own, with each one that is durable and verified
        self.on_saved: Callable[[CheckpointSaved], None] = job.sender.tell
        #: called, on a thread of its own, when one in the folder of all failed; with whether others
        #: write shares of it
        self.on_shared_failed: Callable[[bool], None] = _nobody_asks
        #: in the folder of all we see what others wrote there
        self.sees_others = False
        self.keepers = Keepers(job.rank, job.domain)  # whose memory keeps what we save
        #: the address of this node's holder where that is to keep ours too, else ""
        self.own_holder: Callable[[], str] = lambda: ""
        #: called, on a thread of its own, when another keeps it from now on, and when one has
        self.on_keeper: Callable[[], None] = _nobody_looks
        #: "epoch" and "step" of the state that the job began from, as far as that is known, and
        #: "first", the epoch that began with it
        self.began: Mapping[str, Any] = {}
        #: of tiers of our node's own the step of the last save of which every rank has its part: it
        #: stays, for if another rank's saves fail ours are worth nothing
        self.common: dict[TierName, int] = {}
        #: the same of what is in memory, if it is known: its epoch and step
        self.held_by_all: tuple[int, int] | None = None
        self._epochs: dict[int, int] = {}  # of what was saved to memory, by its step
        #: bytes of what describes the last copy
        self.described = 0
        self._share_flaw = ""  # why we could not write the last one of ours
        #: one alone could not write to the folder of all either, and has told so: until somebody
        #: can, or that one is gone, nobody else does
        self._told_by_one = False
        self._looking = False  # the writer is asked whether we do
        self._unseen = 0  # how often we did not, one time after the other
        self._failing: set[TierName] = set()  # of which an engineer was told
        self._object_told = False  # that it fails, since the members are these
        self._alarmed: dict[TierName, set[str]] = {}  # what the last save had, though it is whole
        #: tiers and saves -> when they were asked for, monotonic
        self._under_way: dict[tuple[TierName, str], float] = {}
        #: one for each tier: a store that hangs holds up no other
        self._writers = {name: WriterHandle(partial(self._hear, name)) for name in tiers}
        self._given: queue.SimpleQueue[Save | str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._asked: dict[tuple[TierName, str], Write] = {}  # of the writers, by the save's name
        self._facts = facts_of(job)

    def leave_out(self, tier: TierName) -> None:
        """Before anything was saved: it turned out to be none of this job's."""
        self._writers.pop(tier, None)

    def start(self) -> bool:
        """Start the writers, which need a moment; whether there is somebody to give copies to. If
        not an engineer is told, and it may be asked for again."""
        if self._thread is None:
            thread = threading.Thread(target=self._hand_over, name="drydock-saver", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads: no checkpoint is worth the training
                for name in self._writers:
                    self.failed(name, f"no copy could be handed over: {error}")
                return False
            self._thread = thread
        return True

    def give(self, save: Save) -> None:
        """A copy that was begun."""
        with self._lock:
            self._under_way |= {(tier.name, save.name): save.asked for tier in save.tiers}
        self._given.put(save)

    def busy(self, tiers: Collection[TierName]) -> set[TierName]:
        """Those of the tiers to which a save is under way."""
        with self._lock:
            return {tier for tier, _save in self._under_way}.intersection(tiers)

    def under_way_s(self, tier: TierName) -> float:
        """For how long the oldest save to it has been; 0.0 if there is none."""
        now = time.monotonic()
        with self._lock:
            began = (at for (where, _save), at in self._under_way.items() if where == tier)
            return now - min(began, default=now)

    def unwell(self) -> set[TierName]:
        """The tiers of which the last save failed."""
        shared: set[TierName] = {"shared"} if self._share_flaw else set()
        with self._lock:
            return self._failing | shared

    def look(self, save: str) -> None:
        """One whose name begins so was written to the folder of all: see whether it is there. Its
        writer looks, for that may take long."""
        self._told_by_one = False
        if self._share_flaw:
            self.failed("shared", self._share_flaw)
        with self._lock:
            look = not (self.sees_others or self._looking)
            self._looking |= look
        if look:
            self._given.put(save)

    def _ask_to_look(self, save: str) -> None:
        asked = {"op": "look", "folder": str(self._folders.shared), "save": save}
        try:
            self._writers["shared"].send(asked, self._copy_buffers.there())
        except Exception as error:  # as above
            self._looking = False
            self.failed("shared", f"no writer: {error}")

    def _looked(self, *, seen: bool) -> None:
        self._looking = False
        self.sees_others |= seen
        self._unseen = 0 if seen else self._unseen + 1
        if seen and not self._share_flaw:
            self._is_well("shared")  # another writes there now, and has told so
        if self._unseen == UNSEEN:
            self._job.trouble(
                "checkpoints_not_shared",
                f"{self._folders.shared} on this node has not what another replica wrote there: if "
                "it is one folder on all nodes, all write checkpoints together",
            )

    def forgive(self, *, told: bool) -> None:
        """One alone could not write to the folder of all either. `told`: by that one, and so that
        it fails; not, if it was ourselves and took too long."""
        self._share_flaw = ""
        self._told_by_one |= told

    def regrouped(self, *, came: bool, gone: bool) -> None:
        """There are other members: whether who came has the same folder as we nobody knows, and
        what who is gone has told is told no more. Nor is it known that the object store still
        fails, if another wrote there meanwhile: if it does that is told anew."""
        self.sees_others &= not came
        self._told_by_one &= not gone
        self._object_told = False

    def close(self, wait_s: float) -> list[TierName]:
        """Take no more, and wait until what was given is durable or was refused; of which tiers it
        was not in time. There it goes on without us."""
        if self._thread is None:
            return []
        end = time.monotonic() + wait_s
        self._given.put(None)
        self._thread.join(wait_s)
        late: list[TierName] = [
            name
            for name, writer in self._writers.items()
            if self._thread.is_alive() or not writer.close(max(0.0, end - time.monotonic()))
        ]
        self._thread = None
        return late

    def _hand_over(self) -> None:
        """See to each copy, and give it to the writers."""
        for name, writer in self._writers.items():
            try:
                writer.start()
            except Exception as error:  # without this thread no save would be written
                self.failed(name, f"no writer: {error}")
        while (given := self._given.get()) is not None:
            if isinstance(given, str):
                self._ask_to_look(given)
            else:
                self._see_to(given)
            del given  # its buffer may be given up before another one comes

    def _see_to(self, save: Save) -> None:
        try:
            save.copying.finish(partial(self._pass_on, save))
        except Exception as error:  # without this thread no later save would be written
            self._not_copied(save, repr(error))
        self._let_go(save, "copy")
        for write, flaw in save.flaws or []:
            self._end(write, flaw)

    def _not_copied(self, save: Save, why: str) -> None:
        if save.flaws is None:
            save.flaws = [(Write(save, tier), why) for tier in save.tiers]
            return
        for tier in save.tiers:
            self._writers[tier.name].tell({"op": "not_copied", "save": save.name, "error": why})

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
        """Ask the writers, once the copy is under way: while the training waits for it that is not
        heard of. Tell them how far it is now and then: nobody waits for one that hangs."""
        if save.flaws is None:
            save.flaws = self._ask_all(save)
        whole = save.copying.table.bytes
        rarely = max(TOLD_BYTES, min(save.told, whole // TOLD_TIMES))
        if copied < whole and copied - save.told < rarely:
            return
        save.told = copied
        for tier in save.tiers:
            said = {"op": "copied", "save": save.name, "bytes": copied}
            self._writers[tier.name].tell(said)

    def _described(self, save: Save) -> dict[str, Any]:
        """What any writer is to know of a copy. Raises ValueError if its buffer has too little."""
        table = save.copying.table
        described = json.dumps({"step": save.step, "save": save.name, **table.describe()}).encode()
        start, self.described = aligned(table.bytes, mmap.PAGESIZE), len(described)
        if start + len(described) > len(save.buffer.memory):
            self._copy_buffers.prepare(start + len(described))
            raise ValueError(f"its description has {len(described)} bytes; the next one has room")
        save.buffer.memory[start : start + len(described)] = described
        facts = dict(self._facts)
        if self.began:
            facts["began"] = {one: self.began[one] for one in _BEGAN}
        return {
            "op": "save",
            "buffer": save.buffer.number,
            "image": table.bytes,
            "described": len(described),
            "step": save.step,
            "save": save.name,
            "facts": {**facts, "epoch": save.epoch, "at": round(time.time(), 3)},
        }

    def _ask(self, write: Write, asked: dict[str, Any]) -> None:
        tier, save = write.tier, write.save
        if tier.name == "peer":
            place = self._to_peer(save, int(asked["image"]))
        elif tier.name == "object":
            place = {
                "objects": self._job.object_store,
                "job": self._job.name,
                "rank": self._job.rank,
                "ranks": self._job.ranks,
            }
        else:
            place = self._to_folder(tier, save)

        def stamp(life: int) -> None:
            write.life = life
            with self._lock:
                self._asked[tier.name, save.name] = write

        kept = {
            "keep": tier.keep,
            "keep_for_s": tier.keep_for_s,
            "common": self.common.get(tier.name),
        }
        asked = {**asked, **place, **kept, "pack": tier.pack}
        self._writers[tier.name].send(asked, self._copy_buffers.there(), stamp)

    def _to_folder(self, tier: Tier, save: Save) -> dict[str, Any]:
        return {
            **self._folders.to_write(tier, save.replica),
            "rank": 0 if tier.own else self._job.rank,
            "ranks": 1 if tier.own else self._job.ranks,
            "share": 0 if tier.own else save.share[0],
            "shares": save.shares(tier),
        }

    def _to_peer(self, save: Save, size: int) -> dict[str, Any]:
        keeper = self.keepers.keeper
        if keeper is None:
            raise OSError("no member of this job has a holder")
        ours = self.own_holder()
        common = self.common.get("peer", -1)
        held_by_all = self.held_by_all
        if held_by_all is None and common in self._epochs:
            held_by_all = self._epochs[common], common
        self._epochs[save.step] = save.epoch
        for step in {*[*self._epochs][:-AWAITED]} - {common}:
            del self._epochs[step]
        label = {
            "rank": self._job.rank,
            "ranks": self._job.ranks,
            "step": save.step,
            # Replicas have one state, and so one name; of ours nobody else has any.
            "save": save.name if ours else f"{save.epoch}-{save.step}",
            "epoch": save.epoch,
            "bytes": size,
        }
        return {
            "holders": [ours, keeper.address] if ours else [keeper.address],
            "kept": held_by_all,
            "token": self._job.token,
            "label": label,
            "shared": str(self._folders.shared),
            "run": self._folders.run,
        }

    def _hear(self, tier: TierName, message: dict[str, Any]) -> None:
        """What a writer says."""
        with self._lock:
            writes = {name: one for (where, name), one in self._asked.items() if where == tier}
        if message["op"] == "died":
            self._looking &= tier != "shared"
            for write in writes.values():
                if write.life == message["life"]:
                    self._end(write, f"the writer died with status {message['code']}")
        elif message["op"] == "looked":
            self._looked(seen=bool(message["seen"]))
        elif message["save"] in writes:
            self._hear_of(writes[message["save"]], message)

    def _hear_of(self, write: Write, message: dict[str, Any]) -> None:
        if message["op"] == "alarm":
            self._alarm(write, str(message["kind"]), str(message["text"]))
        elif message["op"] == "durable":
            write.durable_s = time.monotonic() - write.save.asked
        elif message["op"] == "verified":
            write.verified = True
            self._tell(write, message["whole"])
        elif message["op"] == "failed":
            self._failed_write(write, str(message["error"]))
            if "keeper" in message and self.keepers.failed(str(message["keeper"])):
                self.on_keeper()
        elif message["op"] == "done":
            self._alarmed[write.tier.name] = write.alarms
            self._end(write, "")

    def _alarm(self, write: Write, kind: str, text: str) -> None:
        """Told once until a save to that tier is without it; who finds what is stale tells only
        what is new."""
        log.warning("alarm kind=%s tier=%s text=%s", kind, write.tier.name, text)
        known = write.alarms | self._alarmed.get(write.tier.name, set())
        write.alarms.add(kind)
        if kind == "checkpoint_stale" or kind not in known:
            self._job.trouble(kind, f"{write.where}: {text}", write.tier.name)

    def failed(self, tier: TierName, why: str, shares: int = 1) -> None:
        """One alarm, however often it fails until it is well again. What others have shares in is
        tried again by one alone, and what one alone could not write by the next: only if that
        succeeds is it ours that is wrong."""
        if shares > 1 or (tier == "shared" and self._told_by_one and tier not in self._failing):
            self._share_flaw = why
            log.warning("share_failed error=%s", why)
            return
        with self._lock:
            new = tier not in self._failing or (tier == "object" and not self._object_told)
            self._failing.add(tier)
        self._object_told |= tier == "object"
        log.warning("checkpoint_failed tier=%s error=%s", tier, why)
        if new:
            text = (
                f"{why}; while training goes on each save that is due tries again: if it is the "
                f"store's doing see that {self._store_of(tier)} answers and has space"
            )
            self._job.trouble("checkpoint_failed", text, tier)

    def _store_of(self, tier: TierName) -> str:
        """In words, for an engineer."""
        stores = {
            "peer": "the holder that keeps it in memory",
            "local": str(self._job.local_dir),
            "shared": str(self._folders.shared),
            "object": self._job.object_store,
        }
        return stores[tier]

    def _is_well(self, tier: TierName) -> None:
        if tier == "shared":
            self._share_flaw = ""
        with self._lock:
            again = tier in self._failing
            self._failing.discard(tier)
        if again:
            self._job.trouble("checkpoint_recovered", "checkpoints are durable again", tier)

    def _tell(self, write: Write, whole: dict[str, Any] | None) -> None:
        """What we wrote was read back, and with it, perhaps, the `whole` checkpoint."""
        self._is_well(write.tier.name)
        if write.tier.name == "peer":
            self.keepers.kept(write.save.asked)
            self.on_keeper()
        pace = write.tier.pace
        pace.note(write.save.stall_s, write.durable_s, write.save.shares(write.tier))
        if whole is None:
            return
        self.sees_others |= write.tier.shared_out
        self.on_saved(
            CheckpointSaved(
                step=write.save.step,
                tier=write.tier.name,
                path=whole["path"],
                bytes=whole["bytes"],
                stored=whole["stored"],
                digest=whole["digest"],
                stall_s=write.save.stall_s,
                seconds=write.durable_s,
                every_s=pace.every_s,
                ettr=pace.ettr,
                # When it was durable: it was read back since.
                at=time.time() - (time.monotonic() - write.save.asked - write.durable_s),
            )
        )

    def _failed_write(self, write: Write, why: str) -> None:
        if write.failed or write.verified:
            return
        write.failed = True
        shares = write.save.shares(write.tier)
        self.failed(write.tier.name, f"step {write.save.step}: {why}", shares)
        if write.tier.shared_out:
            self.sees_others = False
            self.on_shared_failed(shares > 1)

    def _end(self, write: Write, error: str) -> None:
        """Nothing more is heard of it."""
        save = write.save
        with self._lock:
            self._asked.pop((write.tier.name, save.name), None)
            if write.tier.name in save.ended:
                return
            self._under_way.pop((write.tier.name, save.name), None)
        if error:
            self._failed_write(write, error)
        self._let_go(save, write.tier.name)

    def _let_go(self, save: Save, what: str) -> None:
        """Give a save's buffer back once nothing is under way with it any more.

        It is given back once only, for it may be in use again.
        """
        with self._lock:
            last = what not in save.ended and len(save.ended) == len(save.tiers)
            save.ended.add(what)
        if last:
            self._copy_buffers.give_back(save.buffer)
