"""Waiting for a change in a folder, by inotify: no polling, no delay."""

from __future__ import annotations

import ctypes
import os
import select
import time
from collections.abc import Callable
from pathlib import Path

IN_MODIFY = 0x2
IN_CLOSE_WRITE = 0x8
IN_MOVED_TO = 0x80
IN_CREATE = 0x100

_libc = ctypes.CDLL(None, use_errno=True)


class FolderWatch:
    """`fd` is readable when a file in the folder was created, written or renamed into place."""

    def __init__(self, folder: Path) -> None:
        self.fd: int = _libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        mask = IN_MODIFY | IN_CLOSE_WRITE | IN_MOVED_TO | IN_CREATE
        if _libc.inotify_add_watch(self.fd, os.fsencode(folder), mask) < 0:
            error = OSError(ctypes.get_errno(), "inotify_add_watch", str(folder))
            os.close(self.fd)
            raise error

    def wait(self, timeout_s: float | None = None) -> bool:
        """Sleep until something changed (true) or time is up."""
        ready, _, _ = select.select([self.fd], [], [], timeout_s)
        if ready:
            self.clear()
        return bool(ready)

    def clear(self) -> None:
        """Forget the changes so far."""
        try:
            os.read(self.fd, 65536)
        except BlockingIOError:
            return

    def close(self) -> None:
        os.close(self.fd)


def wait_for_file(
    folder: Path, condition: Callable[[], bool], timeout_s: float, writer: int
) -> bool:
    """Wait until `condition` holds, looking again whenever the folder changes.

    False when the time is up or the process `writer`, a pid, has ended.
    """
    deadline = time.monotonic() + timeout_s
    watch = FolderWatch(folder)
    try:
        ended = os.pidfd_open(writer)
    except ProcessLookupError:
        watch.close()
        return condition()
    try:
        while not condition():
            left = deadline - time.monotonic()
            ready, _, _ = select.select([watch.fd, ended], [], [], max(0.0, left))
            if watch.fd not in ready:
                return condition()
            watch.clear()
        return True
    finally:
        os.close(ended)
        watch.close()
