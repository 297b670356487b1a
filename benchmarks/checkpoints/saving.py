"""What a contender does with a state: save it into a folder, and load it from there.

Imports torch; only contenders' own processes do.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from benchmarks.checkpoints.states import State

now = time.monotonic
BLOCK_BYTES = 4 << 20  # of one request to the disk


@dataclass(frozen=True)
class Kept:
    """When a save was over. Monotonic seconds."""

    durable: float
    verified: float | None = None  # None: the contender does not verify
    path: Path | None = None


@dataclass(frozen=True)
class Saving:
    """A save under way."""

    #: Returns once the state may be changed; a training loop calls it before its optimizer does.
    settle: Callable[[], None]
    done: Future[Kept] = field(default_factory=Future)


class Contender(Protocol):
    """One way to save and load. It is made with the state and a folder of its own."""

    in_place: bool  # whether it loads into tensors that are there

    def prepare(self) -> None:
        """What can be done before the first save, so that it costs what the others do."""

    def save(self, number: int) -> Saving:
        """Begin to save the state; `number` is new."""

    def load(self, number: int, into: State) -> State:
        """What was saved, every byte of it in memory. `into`: tensors as a model has them, whose
        pages were touched; empty unless `in_place`."""

    def close(self) -> None:
        """End what it started."""


def at_once(path: Path) -> Saving:
    """A save that was over, and durable, when it returned."""
    saving = Saving(settle=lambda: None)
    saving.done.set_result(Kept(now(), None, path))
    return saving


def sync(path: Path) -> None:
    """Make a file or all of a folder durable."""
    parts = [path, *(path.rglob("*") if path.is_dir() else [])]
    for part in parts:
        handle = os.open(part, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def forget(path: Path) -> None:
    """Drop from the page cache what the files hold, having read them once past it: below us may be
    another cache, and of contenders that verify it holds all that was written."""
    block = mmap.mmap(-1, BLOCK_BYTES)
    for part in [path, *path.rglob("*")]:
        if part.is_file():
            handle = os.open(part, os.O_RDONLY | os.O_DIRECT)
            try:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                while os.readv(handle, [block]) == BLOCK_BYTES:
                    pass
            finally:
                os.close(handle)


def bytes_in(path: Path) -> int:
    return sum(part.stat().st_size for part in [path, *path.rglob("*")] if part.is_file())
