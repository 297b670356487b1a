"""Keeps the programs of one home running, as an init system would, in a single thread.

Signals are only noted when they arrive and acted on at the next wait, so that nothing is ever left
half done.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType

from controlplane.local.processes import Child, Program, kill_all, marked

Say = Callable[[str], None]

MAX_BACKOFF_S = 10.0
#: A program that ran this long is started again without delay, in seconds.
STEADY_S = 30.0
LOG_CHECK_S = 10.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """Someone asked us to stop."""


class ProgramFailed(Exception):
    """A program that runs once ended with an error; the message holds the end of its log."""


class Supervisor:
    """A context manager: on leaving, everything it has started is stopped."""

    def __init__(self, home: Path, say: Say) -> None:
        self._home = home
        self._say = say
        self._kept: list[_Kept] = []
        self._stop_asked = False
        self._interrupts = 0
        self._next_log_check = 0.0

    def __enter__(self) -> Supervisor:
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in STOP_SIGNALS:
            signal.signal(number, self._note_stop)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop_everything()

    def keep(self, program: Program) -> Child:
        """Start a program and start it again whenever it ends."""
        kept = _Kept(Child(self._home, program))
        self._kept.append(kept)
        kept.start()
        return kept.child

    def run(self, program: Program) -> None:
        """Run a program to its end. Raises ProgramFailed, or Interrupted."""
        child = Child(self._home, program)
        child.start()
        try:
            while (status := child.poll()) is None:
                self.wait(1.0)
        finally:
            child.stop()
        if status != 0:
            tail = f":\n{child.tail()}" if program.logged else ""  # else it has told it itself
            raise ProgramFailed(f"{program.name} failed (status {status}){tail}")

    def wait(self, seconds: float) -> None:
        """Look after the programs for `seconds` or until a signal. Raises Interrupted."""
        self._sleep(min(seconds, self._tend()))
        if self._stop_asked:
            raise Interrupted

    def _tend(self) -> float:
        """Start again what has ended; how long until this should be looked at again."""
        now = time.monotonic()
        if now >= self._next_log_check:
            self._next_log_check = now + LOG_CHECK_S
            for kept in self._kept:
                kept.child.bound_log()
        for kept in self._kept:
            status = kept.child.poll()
            if status is None:
                continue
            if kept.start_at is None:
                delay = kept.plan_restart(now)
                self._say(
                    f"{kept.child.program.name} ended (status {status}); starting it again in "
                    f"{delay:.1f} s, see {kept.child.log}"
                )
            elif now >= kept.start_at:
                self._start_again(kept, now)
        due = [kept.start_at - now for kept in self._kept if kept.start_at is not None]
        return max(0.0, min([*due, LOG_CHECK_S]))

    def _start_again(self, kept: _Kept, now: float) -> None:
        try:
            kept.start()
        except OSError as error:  # a full disk, mostly: the others go on meanwhile
            delay = kept.plan_restart(now)
            self._say(
                f"{kept.child.program.name} cannot be started ({error}); trying again in "
                f"{delay:.1f} s"
            )

    def _sleep(self, seconds: float) -> None:
        select.select([self._wake_read], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def _note_stop(self, number: int, _frame: FrameType | None) -> None:
        self._stop_asked = True
        self._interrupts += number == signal.SIGINT

    # --- stopping ---------------------------------------------------------------------------------

    def _stop_everything(self) -> None:
        """In order, each group together; a second Ctrl-C kills what is left at once.

        No other signal does: `make down` and a closing terminal ask for a stop that is under way.
        """
        patience = max(1, self._interrupts)
        children = [kept.child for kept in self._kept]
        for order in sorted({child.program.stop_order for child in children}):
            group = [child for child in children if child.program.stop_order == order]
            self._stop_group(group, patience)
            self._say(f"stopped {_listed([child.program.name for child in group])}")
        self._kept.clear()
        remains = marked(self._home)
        kill_all(remains)
        if remains:
            self._say(f"killed {len(remains)} processes that had been left behind")

    def _stop_group(self, group: list[Child], patience: int) -> None:
        alive = [child for child in group if child.poll() is None]
        for child in alive:
            child.ask_to_stop()
        deadline = time.monotonic() + max((c.program.stop_s for c in alive), default=0.0)
        while any(child.poll() is None for child in alive):
            if self._interrupts > patience or time.monotonic() > deadline:
                break
            self._sleep(0.2)
        for child in group:
            if not child.finish(time.monotonic()):
                self._say(f"{child.program.name} did not stop in time and was killed")


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


class _Kept:
    """A child, and when it may be started again."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.start_at: float | None = None
        self._started_at = 0.0
        self._backoff_s = 0.0

    def start(self) -> None:
        self.start_at = None
        self._started_at = time.monotonic()
        self.child.start()

    def plan_restart(self, now: float) -> float:
        steady = now - self._started_at > STEADY_S
        self._backoff_s = 0.0 if steady else min(MAX_BACKOFF_S, max(0.5, 2 * self._backoff_s))
        self.start_at = now + self._backoff_s
        return self._backoff_s
