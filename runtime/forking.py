"""Children that a script forks beside the training keep none of its connections and signals.

A forked worker of a loader has a copy of every socket of its parent. If the parent is killed, its
connections are reset only once no copy is left, and a dead replica would look alive. Standard
library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import weakref
from collections.abc import Callable
from types import FrameType

_told_pipe = -1  # to which the numbers of signals are written
_kept: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_taken: dict[int, Callable[[int, FrameType | None], object]] = {}
_closers: list[weakref.WeakMethod[Callable[[], None]]] = []


def keep_from_children(connection: socket.socket) -> None:
    """Have every child that is forked from now on close its copy of this socket."""
    _kept.add(connection)


def in_children(close: Callable[[], None]) -> None:
    """Call this method in every child that is forked while its object is there. Other threads are
    not: it may wait for none, and takes no lock."""
    _closers.append(weakref.WeakMethod(close))


def take_signal(number: int, handler: Callable[[int, FrameType | None], object]) -> None:
    """Handle this signal here, and leave it alone in every child that is forked: one that is told
    to end by it would live on. One that comes while the handler runs says the same, and is not
    handled: in the middle of itself it would wait for a lock that it holds."""
    running = False

    def once(number: int, frame: FrameType | None) -> None:
        nonlocal running
        if running:
            return
        running = True
        try:
            handler(number, frame)
        finally:
            running = False

    signal.signal(number, once)
    _taken[number] = once


def is_taken(number: int) -> bool:
    """Whether this signal is still handled as `take_signal` has it."""
    return number in _taken and signal.getsignal(number) is _taken[number]


def write_signals(pipe: int) -> None:
    """Have the number of each signal that is handled written to this pipe, which must not block:
    the moment it comes, where a handler waits until the main thread is out of a library's call. Not
    off the main thread, nor where the script has it done for itself."""
    global _told_pipe
    with contextlib.suppress(ValueError):
        before = signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)
        if before in (-1, _told_pipe):
            _told_pipe = pipe
        else:
            signal.set_wakeup_fd(before)


def leave_signals(pipe: int) -> None:
    """Have no more written to it."""
    global _told_pipe
    if pipe == -1 or pipe != _told_pipe:
        return
    with contextlib.suppress(ValueError):  # off the main thread: nobody listens, that is all
        now = signal.set_wakeup_fd(-1)
        _told_pipe = -1
        if now != pipe:
            signal.set_wakeup_fd(now)


def _after_fork() -> None:
    leave_signals(_told_pipe)
    for number, handler in _taken.items():
        if signal.getsignal(number) is handler:
            signal.signal(number, signal.SIG_DFL)
    for connection in list(_kept):
        with contextlib.suppress(OSError):  # it was closed before
            os.close(connection.detach())
    for reference in _closers:
        if (close := reference()) is not None:
            close()


os.register_at_fork(after_in_child=_after_fork)
