"""Memory into which states are copied, for checkpoints and for newcomers.

It is made and touched beforehand, and shared with the writer.

The first touch of memory costs ten times a copy into it, so two buffers are kept for good, and
taken in turn; three with an object store, which may hold one of them for minutes. Each is a memfd:
it has no name that could be left behind, and what was copied lives for as long as the writer has it
open, whatever becomes of this process.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable

from runtime.checkpoint.large_pages import LARGE_BYTES, collapse, emptied, mapped
from runtime.checkpoint.memory_left import LOOK_BYTES, demand
from runtime.image import aligned
from runtime.priority import lower_priority

COPY_BUFFERS = 2
RETRY_S = 30.0  # after memory could not be had
#: Beside the image lies its description, and both may grow: so much more than is needed at first is
#: made room for, and a 64th of the image up to as much again.
SLACK_BYTES = 1 << 20
SLICE_BYTES = 4 << 20
#: How long to rest after each slice that was touched, as a multiple of the time that it took, while
#: nobody waits for the buffer: for the first buffer, which is needed soon, and for the others.
RESTING = (1.0, 3.0)


def unpinned(_memory: memoryview) -> None:
    """No card copies into it."""


class CopyBuffer:
    """One of them, shared memory without a name."""

    def __init__(
        self,
        number: int,
        size: int,
        rest: Callable[[float], object],
        pin: Callable[[memoryview], object],
    ) -> None:
        """Touches all of it, a slice at a time; after each it may `rest`, and is told how many
        seconds that slice took, so that the training goes on meanwhile. Then `pin` has all of it.
        Raises OSError, MemoryError."""
        self.number = number
        self.fd = os.memfd_create(f"drydock-copy-{number}")
        # Not sooner than nobody has it: it may be on its way to a writer.
        weakref.finalize(self, os.close, self.fd).atexit = False
        os.truncate(self.fd, size)
        self.memory = mapped(self.fd, size, writable=True)
        for at in range(0, size, SLICE_BYTES):
            if at % LOOK_BYTES == 0:
                demand(size - at)
            began = time.monotonic()
            part = self.memory[at : at + SLICE_BYTES]
            os.posix_fallocate(self.fd, at, len(part))  # fails here, and not at a first touch
            if not collapse(part):
                # Not MAP_POPULATE, for which the interpreter's lock would be held.
                ctypes.memset(ctypes.byref(ctypes.c_char.from_buffer(part)), 0, len(part))
            rest(time.monotonic() - began)
        pin(self.memory)

    def give_up(self) -> None:
        """Its memory goes back to the system at once, though writers have it mapped: one that hangs
        would never let go of it."""
        emptied(self.memory)
        self.memory = memoryview(b"")


class CopyBuffers:
    """Buffers of one size, and which of them are free. Safe for several threads."""

    def __init__(
        self,
        on_failure: Callable[[str], None],
        count: int = COPY_BUFFERS,
        pin: Callable[[memoryview], object] = unpinned,
    ) -> None:
        """`on_failure` is told why so many cannot be had; `pin` is given each that was made."""
        self._on_failure = on_failure
        self._pin = pin
        self._count = count
        self._changed = threading.Condition()
        self._free: list[CopyBuffer] = []
        self._used: list[CopyBuffer] = []
        self._former: list[CopyBuffer] = []  # too small by now, and not in use
        self._size = 0  # for which there are buffers, or will be
        self._making = self._closed = False
        self._wanted = threading.Event()  # somebody waits for the buffer that is being made
        self._not_before = 0.0
        self._generation = 0  # how often there was another buffer

    def made(self) -> bool:
        """Whether there are any, free or not."""
        with self._changed:
            return bool(self._free or self._used)

    def lacks(self) -> bool:
        """Whether some could not be had, and it is time to try again."""
        with self._changed:
            there = len(self._free) + len(self._used)
            late = time.monotonic() >= self._not_before
            return 0 < there < self._count and late and not self._making

    def complete(self) -> None:
        """Begin to make those that are lacking; later, if they cannot be had at present."""
        with self._changed:
            if self._making:
                return
            self._making = True
            try:
                threading.Thread(target=self._make, name="drydock-copys", daemon=True).start()
            except RuntimeError as error:  # no more threads, and whoever asks may be training
                self._making = False
                self._put_off(error)

    def prepare(self, size: int, *, at_once: bool = False) -> bool:
        """Begin to make buffers for images of this size, unless there are such or they are being
        made: at once in the place of those that are free, of the others when they are given back.
        Returns False if they cannot be had at present; `at_once` they are tried for also if they
        could not be had just now."""
        with self._changed:
            self._closed = False
            there = self._making or self._free or self._used
            if there and (size <= self._size or self._making):
                return True
            if time.monotonic() < self._not_before and not at_once:
                return False
            slack = SLACK_BYTES + min(size // 64, SLACK_BYTES)
            self._size = aligned(size + slack, LARGE_BYTES)
            self._former += self._free
            self._free.clear()
            self.complete()
            return self._making

    def take(self, wait_s: float = 0.0) -> CopyBuffer | None:
        """A free one, or None if there is none within the time. It is ours until it is given
        back."""
        with self._changed:
            if not self.await_free(wait_s):
                return None
            self._used.append(self._free.pop())
            return self._used[-1]

    def await_free(self, wait_s: float) -> bool:
        """Whether one is free within the time."""
        with self._changed:
            if wait_s:
                self._wanted.set()
            self._changed.wait_for(lambda: self._free or not (self._used or self._making), wait_s)
            self._wanted.clear()
            return bool(self._free)

    def give_back(self, buffer: CopyBuffer) -> None:
        """It may be taken by others; at most once after each time that it was taken."""
        with self._changed:
            if buffer in self._used:
                self._used.remove(buffer)
                if len(buffer.memory) < self._size:
                    self._former.append(buffer)
                    self.complete()
                else:
                    self._free.append(buffer)
            self._changed.notify_all()

    def any_free(self) -> bool:
        with self._changed:
            return bool(self._free)

    def all_free(self) -> bool:
        """Whether all that there should be are made, and none is in use."""
        with self._changed:
            return len(self._free) == self._count and not self._used

    def there(self) -> tuple[int, list[CopyBuffer]]:
        """All buffers, free or not; before them how often there was another one."""
        with self._changed:
            return self._generation, [*self._free, *self._used]

    def close(self) -> None:
        """Whoever uses one keeps it for as long as that takes; the others' memory goes back, and no
        more are made unless they are prepared for again."""
        with self._changed:
            self._closed = True
            unused = [*self._free, *self._former]
            for some in (self._free, self._former, self._used):
                some.clear()
        for buffer in unused:
            buffer.give_up()

    def _make(self) -> None:
        """On a thread of its own. Each is there for use as soon as it is made."""
        lower_priority()
        try:
            while self._make_next():
                pass
            self._not_before = 0.0
        except Exception as error:  # a card's, too
            self._put_off(error)
        finally:
            with self._changed:
                self._making = False
                if self._former:  # given back since we looked
                    self.complete()
                self._changed.notify_all()

    def _put_off(self, error: Exception) -> None:
        """They are asked for again later; of an engineer's concern once."""
        first = not self._not_before
        self._not_before = time.monotonic() + RETRY_S
        if first:
            size = self._size
            self._on_failure(
                f"{self._count} times {size} bytes for checkpoints cannot be had: {error}"
            )

    def _make_next(self) -> bool:
        """Another one, unless there are as many as there may be: a former one that is in use counts
        too, for its writer may hang for ever."""
        with self._changed:
            former, self._former = self._former, []
            there = {one.number for one in [*self._free, *self._used]}
            lacking = min({*range(self._count)} - there, default=None)
            if self._closed:
                lacking = None
            resting = RESTING[bool(self._free)]
        while former:
            former.pop().give_up()
        if lacking is None:
            return False

        def rest(took_s: float) -> None:
            self._wanted.wait(resting * took_s)

        made = CopyBuffer(lacking, self._size, rest, self._pin)
        with self._changed:
            self._wanted.clear()
            closed = self._closed
            if not closed:
                self._free.append(made)
                self._generation += 1
            self._changed.notify_all()
        if closed:
            made.give_up()
        return not closed
