"""What bounds a checkpoint on this machine, in the guise of contenders: memory and the disk."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.checkpoints.rivals import Plain
from benchmarks.checkpoints.saving import BLOCK_BYTES, Saving, at_once
from benchmarks.checkpoints.states import State, size_of
from runtime.image import pages

READERS = 4


class Memcpy(Plain):
    """One copy of the state, into memory that was touched before; from a card, into pinned memory.
    It keeps nothing."""

    def prepare(self) -> None:
        self._copy = {
            name: torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)
            for name, tensor in self.state.items()
        }

    def save(self, number: int) -> Saving:
        del number
        for name, tensor in self.state.items():
            self._copy[name].copy_(tensor, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return at_once(self.folder)

    def load(self, number: int, into: State) -> State:
        del number, into
        return self._copy


class Disk(Plain):
    """As many bytes as the state has, past the page cache, and nothing else: from and into memory
    that is used again and again, so that it stays in the processor's cache."""

    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state, folder)
        self._blocks = -(-size_of(state) // BLOCK_BYTES)

    def prepare(self) -> None:
        self._copy_buffers = self._filled(READERS)

    def save(self, number: int) -> Saving:
        path = self.path(number)
        path.mkdir()
        flags = os.O_WRONLY | os.O_CREAT | os.O_DIRECT
        file = os.open(path / "bytes", flags, 0o600)
        try:
            for block in range(self._blocks):
                if (
                    os.write(file, self._copy_buffers[block % len(self._copy_buffers)])
                    != BLOCK_BYTES
                ):
                    raise OSError("the disk took only a part of a block")
            os.fsync(file)
        finally:
            os.close(file)
        return at_once(path)

    def load(self, number: int, into: State) -> State:
        self._read(number, self._copy_buffers)
        return into

    def _filled(self, copy_buffers: int) -> list[memoryview]:
        found = blocks_of(copy_buffers)
        data = os.urandom(BLOCK_BYTES)
        for room in found:
            room[:] = data  # the first touch would count as reading
        return found

    def _read(self, number: int, copy_buffers: list[memoryview]) -> None:
        """Every block, several at once, each into the next room."""
        file = os.open(self.path(number) / "bytes", os.O_RDONLY | os.O_DIRECT)

        def one(block: int) -> None:
            os.preadv(file, [copy_buffers[block % len(copy_buffers)]], block * BLOCK_BYTES)

        try:
            with ThreadPoolExecutor(READERS) as pool:
                list(pool.map(one, range(self._blocks)))
        finally:
            os.close(file)


class DiskOfState(Disk):
    """The same, from memory as large as the state, and into such that this process has not used
    before. Nothing that saves or loads a state can do without that."""

    def prepare(self) -> None:
        self._copy_buffers = self._filled(self._blocks)

    def load(self, number: int, into: State) -> State:
        self._read(number, blocks_of(self._blocks))
        return into


def blocks_of(count: int) -> list[memoryview]:
    """In large pages: from small ones, that lie anywhere, a disk takes up to twice as long."""
    memory = pages(count * BLOCK_BYTES)
    return [memory[at : at + BLOCK_BYTES] for at in range(0, len(memory), BLOCK_BYTES)]
