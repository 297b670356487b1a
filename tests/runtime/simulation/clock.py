"""Simulated time, processes that may freeze or die, and threads that wait in simulated time.

A thread here is a greenlet, so that code which blocks runs as it is. Nothing may depend on real
time, on the order of a set of strings, or on anything but the seed.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet  # type: ignore[import-untyped]


class Clock:
    """What happens when, and a trace of it."""

    CLOCK_BOOTTIME = 0

    def __init__(self, seed: int, *, tracing: bool) -> None:
        self.now = 1000.0
        self.random = random.Random(seed)  # noqa: S311 - repeats
        self.trace: list[str] = []
        self.main = getcurrent()
        self._tracing = tracing
        self._number = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def monotonic(self) -> float:
        return self.now

    def clock_gettime(self, _which: int) -> float:
        return self.now

    def at(self, delay: float, act: Callable[..., None], *given: Any) -> None:
        """Call this so many seconds from now."""
        self._number += 1
        heapq.heappush(self._events, (self.now + delay, self._number, act, given))

    def run(self, until: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass until `done`; False if that did not happen before `until`."""
        while self._events and self._events[0][0] <= until:
            self.now, _number, act, given = heapq.heappop(self._events)
            act(*given)
            if done():
                return True
        self.now = until
        return done()

    def note(self, text: str, *given: object) -> None:
        """For whoever reads the trace of a failing seed."""
        if self._tracing:
            self.trace.append(f"{self.now - 1000:8.3f} {text % given}")


class Process:
    """Something that runs, is frozen, or is dead; all that happens to it goes through `after`."""

    def __init__(self, clock: Clock, name: str) -> None:
        self.clock = clock
        self.name = name
        self.alive = True
        self.frozen = False
        self._deferred: dict[object, list[tuple[Callable[..., None], tuple[Any, ...]]]] = {}
        self._threads: list[Thread] = []

    def after(self, delay: float, channel: object, act: Callable[..., None], *given: Any) -> None:
        """Call this later, if we live; what belongs to one channel happens in order."""
        self.clock.at(delay, self._happen, channel, act, given)

    def start(self, body: Callable[[], None]) -> Thread:
        """A thread of this process."""
        thread = Thread(self, body)
        self._threads.append(thread)
        self.after(0.0, thread, thread.resume)
        return thread

    def current(self) -> Thread:
        """The one that runs."""
        return next(one for one in self._threads if one.runs)

    def freeze(self) -> None:
        self.frozen = True
        self.clock.note("%s is frozen", self.name)

    def thaw(self) -> None:
        """Wake: what came meanwhile happens now, one channel overtaking another."""
        if not self.frozen or not self.alive:
            return
        self.clock.note("%s wakes", self.name)
        self.frozen = False
        waiting, self._deferred = self._deferred, {}
        while waiting and self.alive:
            channel = self.clock.random.choice(list(waiting))
            act, given = waiting[channel].pop(0)
            if not waiting[channel]:
                del waiting[channel]
            self._do(act, given)

    def end(self) -> None:
        """No thread of ours runs any more. Not to be called from one."""
        if not self.alive:
            return
        self.alive = False
        self._deferred.clear()
        for thread in self._threads:
            thread.kill()

    def failed(self, error: BaseException) -> None:
        """Something that ran here raised this."""
        raise error

    def _happen(self, channel: object, act: Callable[..., None], given: tuple[Any, ...]) -> None:
        if not self.alive:
            return
        if self.frozen:
            self._deferred.setdefault(channel, []).append((act, given))
        else:
            self._do(act, given)

    def _do(self, act: Callable[..., None], given: tuple[Any, ...]) -> None:
        try:
            act(*given)
            for thread in tuple(self._threads):
                thread.look()
        except BaseException as error:
            self.failed(error)


class Thread:
    """Code that may wait."""

    def __init__(self, process: Process, body: Callable[[], None]) -> None:
        self.process = process
        self._greenlet = greenlet(body, parent=process.clock.main)
        self._awaited: Callable[[], object] | None = None
        self._wait = 0  # number of the present wait
        self._timed_out = False

    @property
    def runs(self) -> bool:
        return self._greenlet is getcurrent()

    def resume(self) -> None:
        """Run on until it waits again, or ends."""
        self._awaited = None
        self._greenlet.switch()
        if self._greenlet.dead and self in self.process._threads:
            self.process._threads.remove(self)

    def look(self) -> None:
        """Run on if what it waits for has come true."""
        if self._awaited is not None and self._awaited():
            self.resume()

    def wait(self, awaited: Callable[[], object], timeout: float | None = None) -> bool:
        """In this thread: wait until that is true; False if the time passed before."""
        if awaited():
            return True
        self._wait += 1
        self._timed_out = False
        if timeout is not None:
            self.process.after(timeout, self, self._expire, self._wait)
        self._awaited = awaited
        self.process.clock.main.switch()
        return not self._timed_out

    def sleep(self, seconds: float) -> None:
        self.wait(lambda: False, seconds)

    def kill(self) -> None:
        """It never runs again. Not to be called from a thread."""
        self._awaited = None
        self._greenlet.throw(GreenletExit)

    def _expire(self, wait: int) -> None:
        if wait == self._wait and self._awaited is not None:
            self._timed_out = True
            self.resume()
