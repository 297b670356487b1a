"""A state as an image: one run of bytes, a table of the tensors in it, and a hash for each chunk.

What checkpoints, their writer and peers agree on. Imports no torch: the processes that write, hold
and verify images start in a moment and are small.
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

CHUNK_BYTES = 1 << 20
#: Each tensor begins at a multiple of this.
ALIGNMENT = 64
#: Readable bytes; of a buffer that is filled, writable too.
Buffer = bytearray | memoryview


class Damaged(RuntimeError):
    """Bytes do not match their hash, or a file is not what it must be: it must not be used."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Where one tensor lies in an image."""

    name: str
    dtype: str
    shape: list[int]
    offset: int
    bytes: int


@dataclass(frozen=True)
class Table:
    """What an image holds: the state's structure, and where each tensor lies.

    `skeleton` is the state as JSON. In place of each tensor it has `{"$tensor": n}`, which stands
    for `pieces[n]`.
    """

    skeleton: Any
    pieces: tuple[Piece, ...]
    bytes: int  # of the image
    #: From the start to here lie weights that are not trained, then to `trained` what every step
    #: changes, then the rest. Both are multiples of a chunk.
    frozen: int = 0
    trained: int = 0

    @property
    def chunks(self) -> int:
        return -(-self.bytes // CHUNK_BYTES)

    def digest(self, hashes: Sequence[str]) -> str:
        """Of the whole state: xxh3-128 over the table and the hashes of all chunks. If it is
        equal two states are bit-identical; not the other way round, for the table says where each
        tensor lies."""
        described = [self.skeleton, [vars(piece) for piece in self.pieces], list(hashes)]
        return xxhash.xxh3_128_hexdigest(json.dumps(described, sort_keys=True).encode())

    def names_in(self, chunk: int) -> list[str]:
        """The tensors of which something lies in this chunk."""
        first, last = chunk * CHUNK_BYTES, (chunk + 1) * CHUNK_BYTES
        return [p.name for p in self.pieces if p.offset < last and first < p.offset + p.bytes]

    def describe(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "skeleton": self.skeleton,
            "pieces": [vars(piece) for piece in self.pieces],
            "bytes": self.bytes,
            "frozen": self.frozen,
            "trained": self.trained,
        }

    @staticmethod
    def restore(described: dict[str, Any]) -> Table:
        """Raises KeyError or TypeError if it is not what `describe` gave."""
        return Table(
            described["skeleton"],
            tuple(Piece(**piece) for piece in described["pieces"]),
            int(described["bytes"]),
            int(described["frozen"]),
            int(described["trained"]),
        )


def aligned(offset: int, to: int = ALIGNMENT) -> int:
    """The next multiple, or itself if it is one."""
    return -(-offset // to) * to


def pages(size: int, *, large: bool = True) -> memoryview:
    """Return `size` bytes of new, zeroed memory that begins at a page.

    The kernel zeroes each page at its first touch. With `large` it is asked for large pages,
    because the first touch of small pages takes longer than a disk. A bytearray is not used: Python
    would clear it first and hold the interpreter's lock, so that for hundreds of megabytes no
    thread of this process could answer anyone.
    """
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if large:
        with contextlib.suppress(OSError):  # a kernel without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[:size]


def hash_of(chunk: Buffer) -> str:
    """Return the chunk's xxh3-128, as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(chunk)


def chunks_of(buffer: Buffer) -> Iterator[memoryview]:
    """Yield views of a buffer's consecutive chunks of CHUNK_BYTES bytes.

    The last one may be shorter; an empty buffer has none.
    """
    view = memoryview(buffer)
    for start in range(0, len(view), CHUNK_BYTES):
        yield view[start : start + CHUNK_BYTES]


class ChunkHashes:
    """The hashes of an image's chunks, computed while its bytes arrive in order."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._open = xxhash.xxh3_128()
        self._size = 0  # of what the open chunk has so far

    def add(self, data: memoryview) -> None:
        """Hash the image's next bytes; they may begin and end anywhere in a chunk."""
        while data:
            part = data[: CHUNK_BYTES - self._size]
            self._open.update(part)
            self._size += len(part)
            data = data[len(part) :]
            if self._size == CHUNK_BYTES:
                self._close()

    def end(self) -> tuple[str, ...]:
        """All of them, with the last, which may be shorter."""
        if self._size:
            self._close()
        return tuple(self._done)

    def _close(self) -> None:
        self._done.append(self._open.hexdigest())
        self._open, self._size = xxhash.xxh3_128(), 0


@dataclass(frozen=True)
class Staged:
    """A copy of a state at the edge after `step`. Never changed once made."""

    step: int
    table: Table
    buffer: Buffer
    known: tuple[str, ...] | None = None  # the chunks' hashes, where they were just compared

    @functools.cached_property
    def hashes(self) -> tuple[str, ...]:
        """xxh3-128 of each chunk, so that parts can be taken from several places."""
        if self.known is not None:
            return self.known
        return tuple(hash_of(chunk) for chunk in chunks_of(self.buffer))

    @functools.cached_property
    def digest(self) -> str:
        return self.table.digest(self.hashes)

    def describe(self) -> dict[str, Any]:
        """All but the bytes, as JSON."""
        return {
            "step": self.step,
            **self.table.describe(),
            "chunks": list(self.hashes),
            "digest": self.digest,
        }

    @staticmethod
    def restore(
        described: dict[str, Any], buffer: Buffer, known: tuple[str, ...] | None = None
    ) -> Staged:
        """Put the description and the bytes together. Raises Damaged unless the digest matches.
        `known`: the chunks' hashes, where the caller has just computed them."""
        table = Table.restore(described)
        staged = Staged(int(described["step"]), table, buffer, known)
        whole = len(buffer) == table.bytes and len(staged.hashes) == table.chunks
        if not whole or staged.digest != described["digest"]:
            raise Damaged(
                f"state of step {staged.step}: digest {staged.digest} is not "
                f"{described['digest']}; take another copy"
            )
        return staged
