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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.checkpoint import store
from runtime.checkpoint.facts import facts_of
from runtime.checkpoint.handle import WriterHandle
from runtime.checkpoint.manifest import Manifest
from runtime.checkpoint.rooms import Room, Rooms
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
    life: int = 0  # of the writer that was asked
    durable: dict[str, Any] | None = None  # what the writer said
    verified: bool = False
    ended: bool = False  # its room was given back


class Checkpointer:
    """Saves of one job to its state folder, every `every_s` seconds and when asked."""

    def __init__(self, job: Job, *, every_s: float = 20.0, keep: int = store.KEEP) -> None:
        self.job = job
        self.every_s = every_s
        self.keep = keep
        self.folder = Path(job.state_dir) / "checkpoints"
        #: called, on a thread of its own, with each one that is durable and verified
        self.on_saved: Callable[[CheckpointSaved], None] = job.sender.tell
        self._last = time.monotonic()
        self._late = False
        self._again = False  # there was too little room, and more is being made
        #: where states are copied to; copies for newcomers are made in them too
        self.rooms = Rooms(lambda why: job.trouble("no_room_for_checkpoints", why))
        self._writer = WriterHandle(self._hear)
        self._copied: queue.SimpleQueue[Save | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._asked: dict[str, Save] = {}  # of the writer, by name
        self._facts = facts_of(job)

    # --- loading --------------------------------------------------------------------------------

    def saves(self) -> list[tuple[int, str]]:
        """The steps and names of the checkpoints that are there, unverified, newest first.

        Raises ValueError if there are some, and none that could be ours; OSError if the folder
        cannot be read.
        """
        found = [(path, manifest) for path, manifest in store.listed(self.folder)]
        whole = [manifest for _path, manifest in found if isinstance(manifest, Manifest)]
        for manifest in (one for _path, one in found if isinstance(one, Damaged)):
            self.job.trouble("checkpoint_refused", str(manifest))
        if found and not whole:
            raise ValueError(
                f"none of the {len(found)} checkpoints in {self.folder} can be read: mend that, or "
                "to begin anew move that folder away"
            )
        ours = [one for one in whole if len(one.parts) == self.job.ranks]
        if whole and not ours:
            raise ValueError(
                f"{self.folder} has checkpoints of replicas of {len(whole[0].parts)} ranks, this "
                f"one has {self.job.ranks}: resume with as many, or give another DRYDOCK_STATE_DIR"
            )
        return [(one.step, one.save) for one in ours]

    def read(self, name: str) -> Staged | None:
        """Our part of one checkpoint, or None if it does not verify, which is told."""
        for path, found in store.listed(self.folder):
            if isinstance(found, Manifest) and found.save == name:
                try:
                    return store.read(path, self.job.rank)
                except (Damaged, OSError) as error:
                    self.job.trouble("checkpoint_refused", str(error))
        return None

    # --- saving ---------------------------------------------------------------------------------

    def due(self) -> bool:
        """Whether the interval is over, or the last save is to be tried again."""
        return self._again or time.monotonic() - self._last >= self.every_s

    def prepare(self, size: Callable[[], int]) -> bool:
        """Whether a state can be taken at once. Begins to make room for it and starts the writer,
        so that the first save costs what the others do. `size` tells how many bytes it takes; it
        is asked only if there is no room yet."""
        self._start()
        if not self.rooms.made():
            self.rooms.prepare(size())
            return False
        if self.rooms.any_free():
            return True
        if self.due() and not self._late:
            self._late = True
            self.job.trouble("checkpoint_late", "the store is slower than checkpoints are due")
        return False

    def save(
        self,
        begin: Callable[[memoryview | None], Copying],
        name: str,
        *,
        last: bool = False,
    ) -> Copying | None:
        """Begin a copy and see that it is written; None if there is no room for it, which an
        engineer is told unless more room is being made.

        `begin` begins the copy in the memory that it is given. No step may be applied before the
        copy is finished. `name` is the same on all ranks, and new. The `last` one of all waits for
        room, for FINISH_S.
        """
        asked = time.monotonic()
        self._start()
        if not self.rooms.made():
            self.rooms.prepare(0)  # how much is needed turns out below
        while (room := self.rooms.take(FINISH_S if last else 0.0)) is not None:
            try:
                copying = begin(room.memory)
            except TooSmall as error:
                self.rooms.give_back(room)
                self.rooms.prepare(error.needed)
                self._again = not last
                if not last:
                    return None
                continue
            except Exception as error:  # no checkpoint is worth the training
                self.rooms.give_back(room)
                self._last, self._again = time.monotonic(), False
                self.job.trouble("checkpoint_failed", f"no copy could be made: {error!r}")
                return None
            self._last, self._late, self._again = time.monotonic(), False, False
            paid_s = time.monotonic() - asked
            self._copied.put(Save(name, copying.step, copying, room, asked, paid_s))
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
            "folder": str(self.folder.absolute()),
            "step": save.step,
            "save": save.name,
            "rank": self.job.rank,
            "ranks": self.job.ranks,
            "keep": self.keep,
            "facts": {**self._facts, "at": round(time.time(), 3)},
        }

        def stamp(life: int) -> None:
            save.life = life
            with self._lock:
                self._asked[save.name] = save

        self._writer.send(asked, self.rooms.descriptors(), stamp)

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
            self.job.trouble(message["kind"], f"step {save.step}: {message['text']}")
        elif message["op"] == "durable":
            save.durable = {**message, "seconds": time.monotonic() - save.asked}
        elif message["op"] == "verified":
            save.verified = True
            self._tell(save)
        elif message["op"] == "failed":
            self.job.trouble("checkpoint_failed", f"step {save.step}: {message['error']}")
        elif message["op"] == "done":
            self._end(save, "")

    def _tell(self, save: Save) -> None:
        if save.durable is None:
            raise ValueError("it was verified before it was durable")
        self.on_saved(
            CheckpointSaved(
                step=save.step,
                tier="shared",
                path=save.durable["path"],
                bytes=save.durable["bytes"],
                digest=save.durable["digest"],
                stall_s=save.begin_s + save.copying.waited_s,
                seconds=save.durable["seconds"],
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
        if error and not save.verified:
            self.job.trouble("checkpoint_failed", f"step {save.step}: {error}")
        self.rooms.give_back(save.room)
