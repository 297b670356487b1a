"""A consistent copy of the training state: one buffer of bytes and a JSON description.

Used by checkpoints and by peers alike. It never pickles: what is not a tensor must be JSON.
The training thread pays one memcpy (`stage`); hashing is for another thread (`Staged.digest`).
"""

from __future__ import annotations

import ctypes
import functools
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import xxhash

CHUNK_BYTES = 1 << 20
#: Writable bytes.
Buffer = bytearray | memoryview


class Damaged(RuntimeError):
    """Bytes do not match their hash: this copy must not be used."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Where one tensor lies in the buffer."""

    name: str
    dtype: str
    shape: list[int]
    offset: int
    bytes: int


@dataclass(frozen=True)
class Staged:
    """A copy of the state at the edge after `step`. Never changed once made."""

    step: int
    skeleton: Any  # the state with each tensor replaced by {"$tensor": index}
    pieces: tuple[Piece, ...]
    buffer: Buffer
    known: tuple[str, ...] | None = None  # the chunks' hashes, if they were just compared

    @functools.cached_property
    def digest(self) -> str:
        """Over everything: equal exactly if the two states are bit-identical."""
        return digest_over(self.skeleton, self.pieces, self.chunk_hashes)

    @functools.cached_property
    def chunk_hashes(self) -> tuple[str, ...]:
        """xxh3-128 of each chunk of the buffer, so that parts can be taken from several places."""
        if self.known is not None:
            return self.known
        return tuple(xxhash.xxh3_128_hexdigest(chunk) for chunk in self.chunks())

    def chunks(self) -> Iterator[memoryview]:
        view = memoryview(self.buffer)
        for start in range(0, len(view), CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]

    def describe(self) -> dict[str, Any]:
        """The JSON half; with the buffer it is the whole."""
        return {
            "step": self.step,
            "skeleton": self.skeleton,
            "pieces": [vars(piece) for piece in self.pieces],
            "bytes": len(self.buffer),
            "digest": self.digest,
        }

    @staticmethod
    def restore(
        described: dict[str, Any], buffer: Buffer, known: tuple[str, ...] | None = None
    ) -> Staged:
        """Put the two halves together. Raises Damaged unless the digest matches. `known`: the
        chunks' hashes, where the caller has just computed them."""
        pieces = tuple(Piece(**piece) for piece in described["pieces"])
        staged = Staged(described["step"], described["skeleton"], pieces, buffer, known)
        whole = known is None or len(known) == -(-len(buffer) // CHUNK_BYTES)
        if len(buffer) != described["bytes"] or not whole or staged.digest != described["digest"]:
            raise Damaged(
                f"state of step {staged.step}: digest {staged.digest} is not "
                f"{described['digest']}; take another copy"
            )
        return staged

    def state(self) -> Any:
        """The state itself; its tensors share memory with the buffer."""
        tensors = [view_of(self.buffer, piece) for piece in self.pieces]
        return decode(self.skeleton, tensors)


def stage(state: Any, step: int, into: memoryview | None = None) -> Staged:
    """Copy a nested state of dicts, lists, tuples, tensors and JSON values. `into`: see Copying."""
    return Copying(state, step, into).finish()


def digest_of(state: Any) -> str:
    """The digest that a copy of this state would have; none is made."""
    tensors: list[tuple[str, torch.Tensor]] = []
    skeleton = encode(state, "", tensors)
    pieces, _size = lay_out(tensors)
    chunks = Chunks()
    for piece, (_name, tensor) in zip(pieces, tensors, strict=True):
        chunks.add(bytes_of(tensor.detach().contiguous()))
        end = piece.offset + piece.bytes
        chunks.add(memoryview(bytes(aligned(end) - end)))
    return digest_over(skeleton, pieces, chunks.end())


class Chunks:
    """The hashes of a buffer's chunks, of which the bytes come one after another."""

    def __init__(self) -> None:
        self._hashes: list[str] = []
        self._open = xxhash.xxh3_128()
        self._size = 0  # of what the open chunk has so far

    def add(self, data: memoryview) -> None:
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
        return tuple(self._hashes)

    def _close(self) -> None:
        self._hashes.append(self._open.hexdigest())
        self._open, self._size = xxhash.xxh3_128(), 0


def digest_over(skeleton: Any, pieces: tuple[Piece, ...], hashes: tuple[str, ...]) -> str:
    """Of a state: xxh3-128 over its description and the hashes of its chunks."""
    described = [skeleton, [vars(piece) for piece in pieces], hashes]
    return xxhash.xxh3_128_hexdigest(json.dumps(described, sort_keys=True).encode())


#: When a tensor has to be in a copy: it may change any time, with the next step, or not before
#: another state is loaded.
When = Literal["now", "soon", "whenever"]


class Copying:
    """A copy under way: what may change any time is in it at once, the rest after `finish`."""

    def __init__(
        self,
        state: Any,
        step: int,
        into: memoryview | None = None,
        when: Callable[[str, torch.Tensor], When] = lambda _name, _tensor: "now",
    ) -> None:
        """`into`: what `touched` gave for the size that `size_of` tells; the copy costs a fifth
        then. If the size is not right other memory is taken. `when`: says of each tensor, by its
        name, how long the caller leaves it unchanged: until `settled`, or until `finished`."""
        tensors: list[tuple[str, torch.Tensor]] = []
        self._skeleton = encode(state, "", tensors)
        self._step = step
        self._pieces, size = lay_out(tensors)
        if into is None or len(into) != size:
            into = allocate(size, pinned=any(tensor.is_cuda for _, tensor in tensors))
        self._buffer = into
        self._rest: dict[When, list[tuple[Piece, torch.Tensor]]] = {"soon": [], "whenever": []}
        self._stream = stream_beside([tensor for _, tensor in tensors])
        self.settled = threading.Event()  # what the next step changes is copied
        self.finished = threading.Event()
        with torch.cuda.stream(self._stream):
            for piece, (name, tensor) in zip(self._pieces, tensors, strict=True):
                if (due := when(name, tensor)) in self._rest:
                    self._rest[due].append((piece, tensor))
                else:
                    self._copy(piece, tensor)
                end = piece.offset + piece.bytes  # what lies between is hashed too
                self._buffer[end : aligned(end)] = bytes(aligned(end) - end)
        if self._stream is not None:  # nothing on the card changes these before they are copied
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def finish(self) -> Staged:
        """Copy what is left; may be called on another thread, once."""
        parts: list[tuple[When, threading.Event]]
        parts = [("soon", self.settled), ("whenever", self.finished)]
        try:
            for due, done in parts:
                with torch.cuda.stream(self._stream):
                    for piece, tensor in self._rest.pop(due):
                        self._copy(piece, tensor)
                if self._stream is not None:
                    self._stream.synchronize()
                done.set()
        finally:
            self.settled.set()
            self.finished.set()
        return Staged(self._step, self._skeleton, self._pieces, self._buffer)

    def _copy(self, piece: Piece, tensor: torch.Tensor) -> None:
        """From a card it is only begun."""
        view_of(self._buffer, piece).copy_(tensor.detach(), non_blocking=tensor.is_cuda)


def stream_beside(tensors: list[torch.Tensor]) -> torch.cuda.Stream | None:
    """On which to copy them from their card, once they are what they are to be, while the next
    step is computed; None if they are on none."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is None:
        return None
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def size_of(state: Any) -> int:
    """Bytes that a copy of this state takes."""
    tensors: list[tuple[str, torch.Tensor]] = []
    encode(state, "", tensors)
    return lay_out(tensors)[1]


def touched(size: int) -> memoryview:
    """Memory whose pages are there: the first touch costs more than a copy into it."""
    pinned: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return bytes_of(torch.empty(size, dtype=torch.uint8, pin_memory=pinned).zero_())


def allocate(size: int, *, pinned: bool = False) -> memoryview:
    """Memory of torch's: a bytearray would be cleared first, with the interpreter's lock held, and
    for hundreds of megabytes no thread of this process would answer anyone meanwhile."""
    return bytes_of(torch.empty(size, dtype=torch.uint8, pin_memory=pinned))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor, shared with it and kept while it is in use; of one on a
    card, that of a copy."""
    tensor = on_host(tensor)
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(bytearray())
    memory = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]  # what owns it
    return memoryview(memory).cast("B")


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Itself, or a copy of what is on a card. Nothing may be about to write it, on any stream.

    So a reduced gradient crosses the bus only if a peer asks for it, which is after a death; the
    asking thread waits, and beside the kernels of the step under way.
    """
    if not tensor.is_cuda:
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        copy.copy_(tensor, non_blocking=True)
    stream.synchronize()
    return copy


def lay_out(tensors: list[tuple[str, torch.Tensor]]) -> tuple[tuple[Piece, ...], int]:
    """Where each tensor lies in a buffer, and the buffer's size."""
    pieces = []
    offset = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        piece = Piece(name=name, dtype=dtype, shape=list(tensor.shape), offset=offset, bytes=size)
        pieces.append(piece)
        offset = aligned(offset + size)
    return tuple(pieces), offset


def aligned(offset: int) -> int:
    return (offset + 63) // 64 * 64


def view_of(buffer: Buffer, piece: Piece) -> torch.Tensor:
    dtype = getattr(torch, piece.dtype)
    if piece.bytes == 0:
        return torch.empty(piece.shape, dtype=dtype)
    count = piece.bytes // dtype.itemsize
    flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=piece.offset)
    return flat.view(piece.shape)


def encode(value: Any, name: str, tensors: list[tuple[str, torch.Tensor]]) -> Any:
    """JSON for a value; tensors are moved to the list, in a fixed order."""
    if isinstance(value, torch.Tensor):
        tensors.append((name, value))
        return {"$tensor": len(tensors) - 1}
    if isinstance(value, dict):
        pairs = [[key, encode(item, f"{name}.{key}", tensors)] for key, item in value.items()]
        return {"$dict": pairs}
    if isinstance(value, list | tuple):
        kind = "$tuple" if isinstance(value, tuple) else "$list"
        return {kind: [encode(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"state{name} is a {type(value).__name__}; keep tensors, numbers, strings, lists, tuples "
        "and dicts in the state, or give the object state_dict() and load_state_dict()"
    )


def decode(skeleton: Any, tensors: list[torch.Tensor]) -> Any:
    if not isinstance(skeleton, dict):
        return skeleton
    ((kind, inner),) = skeleton.items()
    if kind == "$tensor":
        return tensors[inner]
    if kind == "$dict":
        return {key: decode(item, tensors) for key, item in inner}
    items = [decode(item, tensors) for item in inner]
    return tuple(items) if kind == "$tuple" else items
