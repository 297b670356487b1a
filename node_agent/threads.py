"""Threads and wake-ups. A thread that dies of a surprise takes the whole agent with it.

An agent that has lost a thread must not go on looking alive: it leaves, its init system starts it
again, and everything durable is read back. Ranks are not touched by that.
"""

from __future__ import annotations

import os
import select
import threading
import traceback
from collections.abc import Callable

from node_agent.log import log


def start_thread(name: str, target: Callable[[], None]) -> threading.Thread:
    """Run `target` in a daemon thread."""

    def run() -> None:
        try:
            target()
        except BaseException:
            try:
                log("thread_died", "error", thread=name, error=traceback.format_exc())
            finally:
                os._exit(70)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


class Wake:
    """A bell that a signal handler may ring too (an Event's lock could deadlock there)."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def ring(self) -> None:
        os.eventfd_write(self._fd, 1)

    def wait(self, timeout_s: float, also: tuple[int, ...] = ()) -> list[int]:
        """Sleep until the bell rings, one of the descriptors `also` is readable, or time is up.

        Returns the readable ones among `also`.
        """
        ready, _, _ = select.select([self._fd, *also], [], [], max(0.0, timeout_s))
        if self._fd in ready:
            os.eventfd_read(self._fd)
        return [fd for fd in ready if fd != self._fd]
