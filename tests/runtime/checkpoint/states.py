"""States to be saved, and ways to break what was saved."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.checkpoint import disk
from runtime.checkpoint.watched_store import WatchedStore
from runtime.image import Staged
from runtime.snapshot import Copying, When
from runtime.torture.storage import memory_of

SOON_S = 1.5  # in a trial so long is waited for a store that hangs


def due(name: str, _tensor: torch.Tensor) -> When:
    """As in training: some weights are frozen, some trained."""
    return {".base": "whenever", ".model": "soon"}.get(name[:6].rstrip("."), "now")  # type: ignore[return-value]


def state_of_step(step: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(step)
    return {
        "base": torch.arange(400_000, dtype=torch.float32),
        "model": {"weight": torch.randn(300, 7, generator=generator), "empty": torch.empty(0, 3)},
        "optimizer": {0: (torch.randn(5, generator=generator).bfloat16(), 0.25), 1: None},
        "text": "kept as it is",
        "scalar": torch.tensor(step),
    }


def copy_of_step(step: int, into: memoryview | None = None) -> Copying:
    return Copying(state_of_step(step), step, into, due)


def staged_at(step: int) -> Staged:
    return copy_of_step(step).finish()


def flip_a_bit(path: Path, where: int) -> None:
    data = bytearray(path.read_bytes())
    data[where % len(data)] ^= 1 << (where % 8)
    path.unlink()  # it may be shared with other checkpoints
    path.write_bytes(data)


def flip_held_bits(pid: int) -> None:
    """One in each state that a holder has memory for, as bad memory would."""
    memories = [*memory_of(pid)]
    assert memories
    for memory in memories:
        with memory.open("r+b") as opened:
            opened.seek(1000)
            (byte,) = opened.read(1)
            opened.seek(1000)
            opened.write(bytes([byte ^ 1]))


def impatient(patch: pytest.MonkeyPatch, store: Path | str) -> None:
    """That store, which hangs, is not waited for as long as else; those that are well are."""
    ask = WatchedStore.call

    def ask_it(self: WatchedStore, call: Any, patience_s: float | None = None, **more: Any) -> Any:
        soon_s = SOON_S if self._what == str(store) else patience_s
        return ask(self, call, soon_s, **more)

    patch.setattr(WatchedStore, "call", ask_it)


@contextlib.contextmanager
def hanging(path: Path) -> Iterator[None]:
    """Whoever reads it meanwhile waits; it lies in the shared folder."""
    path.unlink()
    os.mkfifo(path)
    with pytest.MonkeyPatch.context() as patch:
        impatient(patch, path.parent)
        try:
            yield
        finally:
            os.close(os.open(path, os.O_RDWR))  # lets go of those who wait


@contextlib.contextmanager
def unreadable(path: Path, code: int = errno.EIO) -> Iterator[None]:
    """A checkpoint whose manifest nobody can read meanwhile."""
    read_small = disk.read_small

    def read(one: Path) -> bytes:
        if one.parent == path:
            raise OSError(code, os.strerror(code), str(one))
        return read_small(one)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "read_small", read)
        yield
