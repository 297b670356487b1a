"""When to save, and the way of a copy from the training thread to the writer.

The training thread pays for the copying of what it is about to change, at most. A failed save
raises an alarm and never stops the training.
"""

from __future__ import annotations

import json
import mmap
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.checkpoint import store
from runtime.checkpoint.facts import facts_of
from runtime.checkpoint.handle import WriterHandle
from runtime.checkpoint.interval import FAILURES_PER_NODE_DAY
from runtime.checkpoint.manifest import Manifest
from runtime.checkpoint.rooms import Room, Rooms
from runtime.checkpoint.tiers import TIERS, Folders, Interval, Tier, TierName, tiers_of
from runtime.client import CheckpointSaved
from runtime.image import Damaged, Staged, aligned
from runtime.job import Job
from runtime.snapshot import Copying, TooSmall

FINISH_S = 30.0  # how long the end of a job waits for its last checkpoint


@dataclass
class Save:
    """One checkpoint on its way."""

    name: str
    step: int
    copying: Copying
    room: Room
    asked: float  # monotonic
    begin_s: float  # what the training thread paid at the edge
    replica: int
    epoch: int
    tiers: tuple[Tier, ...]
    life: int = 0  # of the writer that was asked
    durable: dict[str, dict[str, Any]] = field(default_factory=dict)  # tier -> what the writer said
    verified: set[str] = field(default_factory=set)  # tiers
    ended: bool = False  # its room was given back


class Checkpointer:
    """Saves of one job, to each of its tiers at intervals and when asked."""

    def __init__(
        self,
        job: Job,
        *,
        every_s: Interval | Mapping[str, Interval] = "auto",
        keep: int = store.KEEP,
        failures_per_node_day: float = FAILURES_PER_NODE_DAY,
    ) -> None:
        """`every_s`: seconds between two saves, of all tiers or of each by its name ("local",
        "shared"); "auto" takes what is best by what saves cost and by `failures_per_node_day`.
        `keep`: so many are kept in the shared folder. Raises ValueError."""
        self.job = job
        self.tiers = tiers_of(job, every_s, keep, failures_per_node_day)
        self.folders = Folders(job)
        #: called, on a thread of its own, with each one that is durable and verified
        self.on_saved: Callable[[CheckpointSaved], None] = job.sender.tell
        self._last = dict.fromkeys(self.tiers, time.monotonic())
        self._late = False
        self._again: set[TierName] = set()  # there was too little room, and more is being made
        #: where states are copied to; copies for newcomers are made in them too
        self.rooms = Rooms(lambda why: job.trouble("no_room_for_checkpoints", why))
        self._writer = WriterHandle(self._hear)
        self._copied: queue.SimpleQueue[Save | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._asked: dict[str, Save] = {}  # of the writer, by name
        self._facts = facts_of(job)

    # --- loading --------------------------------------------------------------------------------

    def saves(self) -> list[tuple[int, str, TierName]]:
        """The step, name and tier of each checkpoint that is there, unverified: that of the latest
        training first, of several of one state the one in the quickest tier.

        A tier that cannot be read, or has some and none that could be ours, is told. If there is no
        other checkpoint it is raised as ValueError, and as OSError if it is the shared one.
        """
        found: list[tuple[int, int, int, str, TierName]] = []
        failed: OSError | ValueError | None = None
        for order, name in enumerate(TIERS):
            if name not in self.tiers:
                continue
            try:
                ours = self._ours(name)
            except (OSError, ValueError) as error:
                if name == "shared" or isinstance(error, ValueError):
                    failed = error
                self.job.trouble("checkpoints_out_of_reach", f"{name}: {error}")
                continue
            for manifest in ours:
                epoch = int(manifest.facts.get("epoch", 0))
                found.append((epoch, manifest.step, -order, manifest.save, name))
        if failed is not None and not found:
            raise failed
        return [(step, save, name) for _, step, _, save, name in sorted(found, reverse=True)]

    def read(self, name: str, tier: TierName) -> Staged | None:
        """Our part of one checkpoint, or None if it does not verify, which is told."""
        try:
            for folder in self.folders.to_read(tier):
                for path, found in store.listed(folder):
                    if isinstance(found, Manifest) and found.save == name:
                        return store.read(path, 0 if self.tiers[tier].own else self.job.rank)
        except (Damaged, OSError) as error:
            self.job.trouble("checkpoint_refused", f"{tier}: {error}")
        return None

    def _ours(self, tier: TierName) -> list[Manifest]:
        """Those in one tier that could be loaded. Raises OSError, ValueError."""
        folders = self.folders.to_read(tier)
        found = [one for folder in folders for _path, one in store.listed(folder)]
        for damaged in (one for one in found if isinstance(one, Damaged)):
            self.job.trouble("checkpoint_refused", f"{tier}: {damaged}")
        whole = [one for one in found if isinstance(one, Manifest)]
        if self.tiers[tier].own:
            return [one for one in whole if one.facts.get("ranks") == self.job.ranks]
        if found and not whole:
            raise ValueError(
                f"none of the {len(found)} checkpoints in {folders[0]} can be read: mend that, or "
                "to begin anew move that folder away"
            )
        ours = [one for one in whole if len(one.parts) == self.job.ranks]
        if whole and not ours:
            raise ValueError(
                f"{folders[0]} has checkpoints of replicas of {len(whole[0].parts)} ranks, this "
                f"one has {self.job.ranks}: resume with as many, or give another DRYDOCK_STATE_DIR"
            )
        return ours

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

    def prepare(self, size: Callable[[], int]) -> bool:
        """Whether a state can be taken at once, which is wanted. Begins to make room for it and
        starts the writer, so that the first save costs what the others do. `size` tells how many
        bytes it takes; it is asked only if there is no room yet."""
        self._start()
        if not self.rooms.made():
            self.rooms.prepare(size())
            return False
        if self.rooms.any_free():
            return True
        if not self._late:
            self._late = True
            self.job.trouble("checkpoint_late", "the store is slower than checkpoints are due")
        return False

    def save(
        self,
        begin: Callable[[memoryview | None], Copying],
        name: str,
        tiers: Collection[TierName] = TIERS,
        *,
        replica: int | None = None,
        epoch: int = 0,
        last: bool = False,
    ) -> Copying | None:
        """Begin a copy and see that it is written to these tiers; None if there is no room for it,
        which an engineer is told unless more room is being made.

        `begin` begins the copy in the memory that it is given. No step may be applied before the
        copy is finished. `name` is the same on all ranks, and new; `replica` is the number that we
        have by now, `epoch` that of the last step. The `last` one of all waits for room, for
        FINISH_S.
        """
        asked = time.monotonic()
        wanted = tuple(self.tiers[one] for one in TIERS if one in tiers and one in self.tiers)
        names = {tier.name for tier in wanted}
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
                self.job.trouble("checkpoint_failed", f"no copy could be made: {error!r}")
                return None
            self._began(names)
            self._late = False
            paid_s = time.monotonic() - asked
            number = self.job.replica if replica is None else replica
            self._copied.put(
                Save(name, copying.step, copying, room, asked, paid_s, number, epoch, wanted)
            )
            return copying
        self.job.trouble("checkpoint_skipped", "the store has not taken the ones before")
        return None

    def finish(self) -> None:
        """Wait until everything handed over is durable or was refused, for FINISH_S at most. What
        is not goes on without us."""
        if self._thread is None:
            return
        self._copied.put(None)
        self._thread.join(FINISH_S)
        if self._thread.is_alive() or not self._writer.close(FINISH_S):
            self.job.trouble("checkpoint_unfinished", f"not durable after {FINISH_S:g} s")
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
        """Give the writer each copy once it is whole."""
        try:
            self._writer.start()
        except OSError as error:
            self.job.trouble("checkpoint_failed", f"no writer could be started: {error}")
        while (save := self._copied.get()) is not None:
            try:
                self._ask(save)
            except Exception as error:  # without this thread no later save would be written
                self._end(save, f"{error!r}")

    def _ask(self, save: Save) -> None:
        table = save.copying.finish().table
        named = {"step": save.step, "save": save.name}
        described = json.dumps({**named, **table.describe()}).encode()
        start = aligned(table.bytes, mmap.PAGESIZE)
        if start + len(described) > len(save.room.memory):
            self.rooms.prepare(start + len(described))
            raise ValueError(f"its description has {len(described)} bytes; the next one has room")
        save.room.memory[start : start + len(described)] = described
        asked = {
            "op": "save",
            "room": save.room.number,
            "image": table.bytes,
            "described": len(described),
            "tiers": [*self._places(save)],
            "step": save.step,
            "save": save.name,
            "facts": {**self._facts, "epoch": save.epoch, "at": round(time.time(), 3)},
        }

        def stamp(life: int) -> None:
            save.life = life
            with self._lock:
                self._asked[save.name] = save

        self._writer.send(asked, self.rooms.descriptors(), stamp)

    def _places(self, save: Save) -> Iterator[dict[str, Any]]:
        """Where it is to be written, the quickest first."""
        for tier in save.tiers:
            try:
                folder = self.folders.to_write(tier, save.replica)
            except OSError as error:
                self.job.trouble("checkpoint_failed", f"step {save.step}, {tier.name}: {error}")
                continue
            alone = {"rank": 0, "ranks": 1} if tier.own else {}
            whole = {"rank": self.job.rank, "ranks": self.job.ranks}
            yield {"tier": tier.name, "folder": str(folder), "keep": tier.keep, **whole, **alone}

    def _hear(self, message: dict[str, Any]) -> None:
        """What the writer says."""
        if message["op"] == "died":
            with self._lock:
                lost = [save for save in self._asked.values() if save.life == message["life"]]
            for save in lost:
                self._end(save, f"the writer died with status {message['code']}")
            return
        with self._lock:
            found = self._asked.get(message["save"])
        if found is not None:
            self._hear_of(found, message)

    def _hear_of(self, save: Save, message: dict[str, Any]) -> None:
        if message["op"] == "alarm":
            where = f"step {save.step}, {message['tier']}"
            self.job.trouble(message["kind"], f"{where}: {message['text']}")
        elif message["op"] == "durable":
            seconds = time.monotonic() - save.asked
            save.durable[message["tier"]] = {**message, "seconds": seconds}
        elif message["op"] == "verified":
            save.verified.add(message["tier"])
            self._tell(save, message["tier"])
        elif message["op"] == "failed":
            where = f"step {save.step}, {message['tier']}"
            self.job.trouble("checkpoint_failed", f"{where}: {message['error']}")
        elif message["op"] == "done":
            self._end(save, "")

    def _tell(self, save: Save, tier: TierName) -> None:
        durable = save.durable[tier]
        stall_s = save.begin_s + save.copying.waited_s
        pace = self.tiers[tier].pace
        pace.note(stall_s, durable["seconds"])
        self.on_saved(
            CheckpointSaved(
                step=save.step,
                tier=tier,
                path=durable["path"],
                bytes=durable["bytes"],
                digest=durable["digest"],
                stall_s=stall_s,
                seconds=durable["seconds"],
                every_s=pace.every_s,
                ettr=pace.ettr,
                at=time.time(),
            )
        )

    def _end(self, save: Save, error: str) -> None:
        """Nothing more is heard of it, and its room is free: once, for the room may be in use
        again."""
        with self._lock:
            self._asked.pop(save.name, None)
            if save.ended:
                return
            save.ended = True
        if error and len(save.verified) < len(save.tiers):
            self.job.trouble("checkpoint_failed", f"step {save.step}: {error}")
        self.rooms.give_back(save.room)
