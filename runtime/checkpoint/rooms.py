"""Memory into which states are copied: made and touched beforehand, and shared with the writer.

The first touch of memory costs ten times a copy into it, so two rooms are kept for good, and taken
in turn. Each is a memfd: it has no name that could be left behind, and what was copied lives for as
long as the writer has it open, whatever becomes of this process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable

from runtime.image import aligned

ROOMS = 2
RETRY_S = 30.0  # after memory could not be had
#: Beside the image lies its description; so much more than it needs at first is made room for.
SLACK_BYTES = 4 << 20
PAGE_BYTES = mmap.PAGESIZE


class Room:
    """One of them."""

    def __init__(self, number: int, size: int) -> None:
        """Touches all of it. Raises OSError, MemoryError."""
        self.number = number
        self.fd = os.memfd_create(f"drydock-room-{number}")
        try:
            os.posix_fallocate(self.fd, 0, size)  # fails here, and not at a first touch
            pages = mmap.mmap(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise
        # Not MAP_POPULATE, for which the interpreter's lock would be held.
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(pages)), 0, size)
        self.memory = memoryview(pages)

    def close(self) -> None:
        """What is mapped stays until nobody uses it."""
        os.close(self.fd)


class Rooms:
    """Two rooms of one size, and which of them are free. Safe for several threads."""

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        """`on_failure` is told why rooms cannot be had."""
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._rooms: list[Room] = []
        self._free: list[Room] = []
        self._making = False
        self._not_before = 0.0
        self.generation = 0  # how often rooms were made

    def made(self) -> bool:
        """Whether there are any, free or not."""
        with self._changed:
            return bool(self._rooms)

    def prepare(self, size: int) -> None:
        """Begin to make rooms for images of this size, unless there are such or they are being
        made."""
        with self._changed:
            if self._making or (self._rooms and len(self._rooms[0].memory) >= size):
                return
            if time.monotonic() < self._not_before:
                return
            self._making = True
        threading.Thread(target=self._make, args=(size,), name="drydock-rooms", daemon=True).start()

    def take(self, wait_s: float = 0.0) -> Room | None:
        """A free one, or None if there is none within the time. It is ours until it is given
        back."""
        with self._changed:
            self._changed.wait_for(lambda: self._free and not self._making, wait_s)
            return self._free.pop() if self._free and not self._making else None

    def give_back(self, number: int) -> None:
        with self._changed:
            free = [room.number for room in self._free]
            self._free += [r for r in self._rooms if r.number == number and number not in free]
            self._changed.notify_all()

    def any_free(self) -> bool:
        with self._changed:
            return bool(self._free) and not self._making

    def descriptors(self) -> list[int]:
        """Of all rooms, in the order of their numbers."""
        with self._changed:
            return [room.fd for room in self._rooms]

    def close(self) -> None:
        with self._changed:
            for room in self._rooms:
                room.close()
            self._rooms, self._free = [], []

    def _make(self, size: int) -> None:
        """On a thread of its own."""
        made: list[Room] = []  # also if another fails
        try:
            with self._changed:  # a writer may still read one of the former size
                self._changed.wait_for(lambda: len(self._free) == len(self._rooms))
                former, self._rooms, self._free = self._rooms, [], []
            while former:  # before the next are made: never more than two of them
                former.pop().close()
            whole = aligned(size + size // 64 + SLACK_BYTES, PAGE_BYTES)
            for number in range(ROOMS):
                made.append(Room(number, whole))
        except (OSError, MemoryError) as error:
            self._not_before = time.monotonic() + RETRY_S
            self._on_failure(f"{ROOMS} times {size} bytes for checkpoints cannot be had: {error}")
        finally:
            with self._changed:
                self._rooms, self._free = made, list(made)
                self._making = False
                self.generation += 1
                self._changed.notify_all()
