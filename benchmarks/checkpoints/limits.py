"""What bounds a checkpoint on this machine, in the guise of contenders: memory and the disk."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.checkpoints.rivals import Plain
from benchmarks.checkpoints.saving import BLOCK_BYTES, Saving, at_once
from benchmarks.checkpoints.states import State, size_of

READERS = 4


class Memcpy(Plain):
    """One copy of the state, into memory that was touched before. It keeps nothing."""

    def prepare(self) -> None:
        self._copy = {name: tensor.clone() for name, tensor in self.state.items()}

    def save(self, number: int) -> Saving:
        del number
        for name, tensor in self.state.items():
            self._copy[name].copy_(tensor)
        return at_once(self.folder)

    def load(self, number: int, into: State) -> State:
        del number, into
        return self._copy


class Disk(Plain):
    """As many bytes as the state has, past the page cache, and nothing else."""

    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state, folder)
        self._blocks = -(-size_of(state) // BLOCK_BYTES)

    def prepare(self) -> None:
        self._block = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        self._block[:] = os.urandom(BLOCK_BYTES)
        self._rooms = [mmap.mmap(-1, BLOCK_BYTES) for _ in range(READERS)]
        for room in self._rooms:
            room[:] = self._block  # the first touch would count as reading

    def save(self, number: int) -> Saving:
        path = self.path(number)
        path.mkdir()
        flags = os.O_WRONLY | os.O_CREAT | os.O_DIRECT
        file = os.open(path / "bytes", flags, 0o600)
        try:
            for _ in range(self._blocks):
                if os.write(file, self._block) != BLOCK_BYTES:
                    raise OSError("the disk took only a part of a block")
            os.fsync(file)
        finally:
            os.close(file)
        return at_once(path)

    def load(self, number: int, into: State) -> State:
        self._read(number, lambda reader, _block: self._rooms[reader])
        return into

    def _read(self, number: int, room: Callable[[int, int], mmap.mmap | memoryview]) -> None:
        """Every block, into where `room` says, by reader and block."""
        file = os.open(self.path(number) / "bytes", os.O_RDONLY | os.O_DIRECT)

        blocks = iter(range(self._blocks))  # each reader takes the next, so that none is behind

        def every(reader: int) -> None:
            for block in blocks:
                os.preadv(file, [room(reader, block)], block * BLOCK_BYTES)

        try:
            with ThreadPoolExecutor(READERS) as pool:
                list(pool.map(every, range(READERS)))
        finally:
            os.close(file)


class DiskKept(Disk):
    """The same; what is read is kept, in memory that this process has not used before. Nothing that
    loads a state can do without that."""

    def load(self, number: int, into: State) -> State:
        memory = mmap.mmap(-1, self._blocks * BLOCK_BYTES)
        memory.madvise(mmap.MADV_HUGEPAGE)
        whole = memoryview(memory)

        def room(_reader: int, block: int) -> mmap.mmap | memoryview:
            return whole[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]

        self._read(number, room)
        return into
