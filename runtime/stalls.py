"""Whether a rank is in the middle of one step for far too long, and where.

A process that hangs in its script, in a read of data or in a kernel still answers all signs of
life, and nobody makes a step until somebody looks.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

#: A step that takes longer than this many usual ones is none that is merely long.
TIMES = 20.0
#: How much one step counts in the usual time.
WEIGHT = 0.1
#: The first steps compile, warm up and fill caches: they may take this many seconds, and say
#: nothing of what is usual.
FIRST_STEPS, FIRST_S = 3, 1800.0
#: What ended by itself once, as an evaluation does, may take this many times as long again.
AGAIN = 1.5
LOOK_S = 1.0
FRAMES = 6  # of the stack, the innermost ones


class Stalls:
    """Looks at one training thread from a thread of its own.

    `trouble` is told `stalled` once a step took too long, with the place where the thread is, and
    `stall_over` if it comes to its end after all.
    """

    def __init__(
        self,
        trouble: Callable[[str, str], object],
        after_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`after_s`: the least time, in seconds, that is too long; 0 for never. Raises ValueError
        if it is below 0."""
        if after_s < 0:
            raise ValueError(f"stalled_after_s={after_s}: give a number of seconds, 0 for never")
        self._trouble = trouble
        self._after_s = after_s
        self._clock = clock
        self._steps = 0
        self._usual_s = 0.0
        #: of parts that count, and of those that do not: an evaluation says nothing of a step
        self._longest_s = {True: 0.0, False: 0.0}
        self._counts = True  # of the part under way
        self._since: float | None = None  # the step under way; None: there is none
        self._told_of: float | None = None
        self._training = 0  # the thread's number
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._run, name="drydock-stalls", daemon=True)

    @contextlib.contextmanager
    def computing(self, *, counts: bool = True) -> Iterator[None]:
        """The calling thread does its part of one step. What it waits for outside, such as other
        replicas, does not count. `counts`: not what follows to a part that was counted."""
        self._training, self._counts = threading.get_ident(), counts
        self._since = began = self._clock()
        if self._watch.ident is None and self._after_s:
            with contextlib.suppress(RuntimeError):  # no more threads: not worth the training
                self._watch.start()
        try:
            yield
        finally:
            self._since = None
            self._note(began, self._clock() - began, counts)

    def look(self) -> None:
        """Tell if the step under way takes too long; once for each."""
        since = self._since
        if since is None or since == self._told_of or not self._after_s:
            return
        lasted = self._clock() - since
        if lasted <= self._too_long_s():
            return
        self._told_of = since
        self._trouble(
            "stalled",
            f"this rank's part of a step has taken {lasted:.0f} s, where it usually takes "
            f"{self._usual_s:.2g} s; its training thread is at {where(self._training)}",
        )

    def close(self) -> None:
        self._ended.set()

    def _too_long_s(self) -> float:
        if self._steps < FIRST_STEPS:
            return max(FIRST_S, self._after_s)
        return max(self._after_s, TIMES * self._usual_s, AGAIN * self._longest_s[self._counts])

    def _note(self, began: float, lasted_s: float, counts: bool) -> None:
        if self._told_of == began:
            self._trouble(
                "stall_over", f"that part of the step came to its end after {lasted_s:.0f} s"
            )
        self._steps += counts
        if self._steps <= FIRST_STEPS:
            self._usual_s = lasted_s if counts else self._usual_s
            return
        self._longest_s[counts] = max(self._longest_s[counts], lasted_s)
        if not counts:
            return
        self._usual_s += WEIGHT * (min(lasted_s, TIMES * self._usual_s) - self._usual_s)

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S):
            self.look()


def where(thread: int) -> str:
    """The innermost calls of a thread, the last one first. Reads no file: its disk may be what the
    thread waits for."""
    frame = sys._current_frames().get(thread)
    calls = islice(traceback.walk_stack(frame), FRAMES) if frame is not None else ()
    return ", called from ".join(
        f"{Path(one.f_code.co_filename).name}:{line} ({one.f_code.co_name})" for one, line in calls
    )
