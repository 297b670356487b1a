"""A consistent copy of the training state, as an image.

Used by checkpoints and by peers alike. It never pickles: what is not a tensor must be JSON.
The training thread pays one memcpy (`stage`), or less (`Copying`); hashing is for another thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import math
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from runtime import priority
from runtime.image import (
    CHUNK_BYTES,
    Buffer,
    ChunkHashes,
    Damaged,
    Piece,
    Staged,
    Table,
    aligned,
    pages,
)

log = logging.getLogger("drydock.checkpoint")

_FOR_ALL_CARDS = 1  # cudaHostRegisterPortable

#: When a tensor has to be in a copy: it may change any time, with every step, or is not trained and
#: changes at all only if the script does something of its own.
When = Literal["now", "soon", "whenever"]
#: Says of each tensor, by its name, when.
Due = Callable[[str, torch.Tensor], When]


def any_time(_name: str, _tensor: torch.Tensor) -> When:
    """Say of each tensor that it may change at any time: the copy must have it at once."""
    return "now"


def as_laid_out(table: Table) -> Due:
    """Has tensors of these names lie as they do in this image, whatever is trained by now."""
    ends: tuple[tuple[int, When], ...] = ((table.frozen, "whenever"), (table.trained, "soon"))
    there: dict[str, When] = {
        piece.name: next((when for end, when in ends if piece.offset < end), "now")
        for piece in table.pieces
    }
    return lambda name, _tensor: there.get(name, "now")


#: What one thread of several takes on in one go of a copy: many small tensors, or a large one.
BATCH_BYTES = 4 << 20
#: What of a large tensor is copied in one go beside the training, and what is taken from a card
#: where it is looked at or sent, and not kept.
SLICE_BYTES = 16 << 20
#: Where tensors that are one are kept once. Elsewhere loading could take them apart, and a state
#: that was loaded would not have the digest of the one that was saved.
TIED = ".model."
#: Kinds of tensors of which a copy of the elements is a copy.
PLAIN = (torch.Tensor, torch.nn.Parameter)
#: What may be a key in a state.
KEYS = (str, int, float, bool, type(None))


def is_key(value: Any) -> bool:
    """Whether it may be a key: JSON has no infinite numbers."""
    return isinstance(value, KEYS) and not (isinstance(value, float) and not math.isfinite(value))


class Layout:
    """Where each tensor of a state is to lie in its image."""

    def __init__(self, state: Any, due: Due = any_time) -> None:
        """Weights that are tied are in it once."""
        self.tensors: list[torch.Tensor] = []
        names: list[str] = []
        skeleton = encode(state, names, self.tensors)
        self.due = [due(name, one) for name, one in zip(names, self.tensors, strict=True)]
        self.order: list[int] = []
        offsets: dict[int, int] = {}
        ends = [0]
        kinds: tuple[When, ...] = ("whenever", "soon", "now")
        for when in kinds:
            ends.append(self._lay(when, aligned(ends[-1], CHUNK_BYTES), offsets))
        frozen, trained = (aligned(end, CHUNK_BYTES) for end in ends[1:3])
        pieces = tuple(
            Piece(
                name=name,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=list(tensor.shape),
                offset=offsets[place],
                bytes=size_in_bytes(tensor),
            )
            for place, (name, tensor) in enumerate(zip(names, self.tensors, strict=True))
        )
        self.table = Table(skeleton, pieces, ends[-1], frozen, trained)

    def _lay(self, when: When, start: int, offsets: dict[int, int]) -> int:
        """Those that are due then, one after the other; where the last one ends."""
        places = [place for place, due in enumerate(self.due) if due == when]
        for place in places:
            offsets[place] = start
            start = aligned(start + size_in_bytes(self.tensors[place]))
        self.order += places
        return start


def digest_of(state: Any, due: Due = any_time) -> str:
    """The digest that a copy of this state would have; none is made."""
    layout = Layout(state, due)
    hashes = ChunkHashes()
    at = 0
    for place in layout.order:
        piece = layout.table.pieces[place]
        hashes.add(memoryview(bytes(piece.offset - at)))
        tensor = plain(layout.tensors[place])
        if tensor.is_cuda:  # it may still be computed, and what copies it waits for nothing
            torch.cuda.current_stream(tensor.device).synchronize()
        for part in slices_of(tensor):
            hashes.add(part)
        at = piece.offset + piece.bytes
    hashes.add(memoryview(bytes(layout.table.bytes - at)))
    return layout.table.digest(hashes.end())


def stage(state: Any, step: int, into: memoryview | None = None) -> Staged:
    """Copy a nested state of dicts, lists, tuples, tensors and JSON values. `into`: see Copying."""
    return Copying(state, step, into).finish()


class TooSmall(ValueError):
    """The state does not fit in the memory that was given for its copy."""

    def __init__(self, needed: int) -> None:
        super().__init__(f"a copy of this state takes {needed} bytes")
        self.needed = needed


#: So many elements of a tensor, or up to twice as many, are looked at, all over it.
MARKED = 64
#: How often torch saw a tensor written, which writes through `.data` escape, and some of its bytes.
Mark = tuple[int, bytes]


def mark_of(tensor: torch.Tensor) -> Mark | None:
    """Equal as long as nothing changes the tensor, or only a small part of it behind torch's back;
    None if that cannot be told without effort."""
    plain_one = type(tensor) in PLAIN and tensor.layout == torch.strided and tensor.is_cpu
    if not plain_one or tensor.is_inference() or not tensor.is_contiguous():
        return None
    return tensor._version, bytes(bytes_of(sample_of(tensor)))


def sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """A few of its elements, all over it; a small tensor whole. A copy."""
    every = max(1, tensor.numel() // MARKED)
    return tensor.detach().reshape(-1)[::every].clone()


@dataclass(frozen=True, eq=False)
class Part:
    """A tensor that is still to be copied, or a slice of one."""

    piece: Piece
    tensor: torch.Tensor
    mark: Mark | None = None  # of one that steps do not change


def parts_of(piece: Piece, tensor: torch.Tensor) -> Iterator[Part]:
    """All of a tensor, so that nobody has to wait long for what another has begun of it."""
    if piece.bytes <= SLICE_BYTES or not is_in_order(tensor):
        yield Part(piece, tensor)
        return
    flat = tensor.detach().view(-1)
    count, size = flat.numel(), flat.element_size()
    step = SLICE_BYTES // size
    for at in range(0, count, step):
        part = flat[at : at + step]
        begin = piece.offset + at * size
        yield Part(replace(piece, shape=[len(part)], offset=begin, bytes=len(part) * size), part)


def is_in_order(tensor: torch.Tensor) -> bool:
    """Whether its memory, as it lies there, is a copy of it."""
    mirrored = tensor.is_conj() or tensor.is_neg()
    return tensor.is_cpu and tensor.is_contiguous() and not mirrored


class Changed(RuntimeError):
    """What nobody was to change was changed while it was copied."""


class Copying:
    """A copy under way: what may change any time is in it at once, the rest after `finish`."""

    def __init__(
        self,
        state: Any,
        step: int,
        into: memoryview | None = None,
        due: Due = any_time,
        steady: Collection[int] = (),
        computed_on: torch.cuda.Stream | None = None,
    ) -> None:
        """`into`: memory that was touched before; a copy into it costs a fifth. `due`: all but what
        is due now the caller leaves unchanged until `wait` has returned. `steady`: the places
        in memory of weights due whenever that steps do not change: for these nobody waits, unless
        the state lies on a card, from where all is copied soon. `computed_on`: where a card
        computes it, if that is not the caller's own stream. Raises TooSmall."""
        layout = Layout(state, due)
        self.step = step
        self.waited_s = 0.0  # how long the training waited for it after it was begun
        self.table = layout.table
        if into is not None and len(into) < self.table.bytes:
            raise TooSmall(room_of(self.table))
        if into is None:
            pinned = any(tensor.is_cuda for tensor in layout.tensors)
            into = allocate(self.table.bytes, pinned=pinned)
        self._buffer = into[: self.table.bytes]
        self._typed: dict[torch.dtype, torch.Tensor] = {}  # all of it, as numbers of each kind
        self._rest: deque[Part] = deque()  # that steps change
        self._steady: deque[Part] = deque()
        self._under_way: dict[int, Part] = {}  # thread -> the first one of what it copies
        self._changed = threading.Condition()
        self._error: Exception | None = None  # that ended it
        self._stream = stream_beside(layout.tensors, computed_on)
        #: what a card copies, until it has: freed memory is soon that of another tensor
        self._held = layout.tensors if self._stream is not None else []
        self._awaited = False  # the training waits for it
        self._shared_out = False  # several threads may copy, each by itself
        self.finished = threading.Event()
        try:
            self._begin(layout, steady)
        except BaseException:
            self._settle()
            raise
        if self._stream is not None:  # nothing on the card changes these before they are copied
            changing = computed_on or torch.cuda.current_stream(self._stream.device)
            changing.wait_stream(self._stream)

    def _begin(self, layout: Layout, steady: Collection[int]) -> None:
        """Copy what is due now, and note the rest."""
        at = 0
        with torch.no_grad(), queued_on(self._stream):
            for place in layout.order:
                piece, tensor = layout.table.pieces[place], layout.tensors[place]
                self._buffer[at : piece.offset] = bytes(piece.offset - at)  # it is hashed too
                at = piece.offset + piece.bytes
                if layout.due[place] == "now":
                    self._copy(piece, tensor)
                    continue
                calm = layout.due[place] == "whenever" and tensor.data_ptr() in steady
                mark = mark_of(tensor) if calm and self._stream is None else None
                if mark is None:
                    self._rest.extend(parts_of(piece, tensor))
                else:
                    self._steady.append(Part(piece, tensor, mark))
        self._buffer[at:] = bytes(self.table.bytes - at)
        self._shared_out = self._stream is None  # else one thread is the only one

    def finish(
        self,
        copied: Callable[[int], object] | None = None,
        *,
        low_priority: bool = False,
        hurry: bool = False,
    ) -> Staged:
        """Copy what is left, on any thread; asked once more it finds nothing left. `copied` is
        told now and then up to which byte the copy is there, unless the training waits for it: then
        nobody should begin anything else. Of one that comes from a card it is told at the end.
        `low_priority`: as soon as nobody waits for what is left, and from then on. `hurry`: on as
        many threads as torch computes on. Raises what made the copy fail, as Changed."""
        try:
            try:
                if hurry:
                    self._call_for_help()
                while self._copy_next(self._rest):
                    self._tell_copied(copied)
                if low_priority and self._stream is None:
                    priority.lower_priority()
                while self._copy_next(self._steady):
                    self._tell_copied(copied)
                with self._changed:
                    self._changed.wait_for(lambda: not self._under_way)
            finally:
                self._settle()
            if self._error is not None:
                raise self._error
        finally:
            self._drop_rest()
            self.finished.set()
            if low_priority:
                priority.lower_priority()
        if copied is not None:
            copied(self.table.bytes)
        return Staged(self.step, self.table, self._buffer)

    def _settle(self) -> None:
        """Until a card has copied all it was asked for, also of a copy that failed: then its memory
        and what was copied may be others'."""
        if self._stream is not None:
            self._stream.synchronize()
        self._held = []

    def wait(self, *, whole: bool = False) -> None:
        """Until all is copied that a step changes: before one is applied. `whole`: until it is
        finished, before the state is replaced. Whoever waits helps, on as many threads as torch
        computes on."""
        began = time.monotonic()
        self._awaited = True
        try:
            self._call_for_help()
            if self._stream is None:
                while self._copy_next(self._rest) or (whole and self._copy_next(self._steady)):
                    pass
        except BaseException as error:  # a signal's handler raised, in the middle of anything
            self._fail(RuntimeError(f"interrupted by {error!r}"))
            raise
        if whole or self._stream is not None:
            self.finished.wait()
        else:
            with self._changed:
                self._changed.wait_for(self._is_settled)
        self._awaited = False
        self.waited_s += time.monotonic() - began

    def _call_for_help(self) -> None:
        """Threads beside the one that waits and the one that finishes it, where that pays. What
        lies on a card that copies itself."""
        if self._stream is not None:
            return
        with self._changed:
            left = sum(part.piece.bytes for part in self._rest)
        for _ in range(min(torch.get_num_threads() - 2, left // SLICE_BYTES)):
            helper = threading.Thread(target=self._help, name="drydock-copy", daemon=True)
            try:
                helper.start()
            except RuntimeError:  # no more threads: the copy takes longer, that is all
                return

    def _help(self) -> None:
        while self._copy_next(self._rest):
            pass

    def _is_settled(self) -> bool:
        """Whether all is copied that a step changes."""
        left = [*self._rest, *self._under_way.values()]
        return all(part.mark is not None for part in left)

    def _tell_copied(self, copied: Callable[[int], object] | None) -> None:
        if copied is not None and self._stream is None and not self._awaited:
            copied(self._there())

    def _copy_next(self, parts: deque[Part]) -> bool:
        """A few of them more; False if none is left that nobody has begun."""
        me = threading.get_ident()
        with self._changed:
            if not parts:
                return False
            self._under_way[me] = parts[0]
            batch = [parts.popleft()]
            size = batch[0].piece.bytes
            on_card = self._stream is not None  # where nobody helps
            while parts and (on_card or size + parts[0].piece.bytes <= BATCH_BYTES):
                batch.append(parts.popleft())
                size += batch[-1].piece.bytes
        try:
            with torch.no_grad(), queued_on(self._stream):
                for part in batch:
                    self._copy(part.piece, part.tensor)
                    if part.mark is not None and part.mark != mark_of(part.tensor):
                        raise Changed(f"{part.piece.name} was changed while it was copied")
        except Exception as error:  # raised where it is finished: the training goes on
            self._fail(error)
            return False
        with self._changed:
            del self._under_way[me]
            self._changed.notify_all()
        return True

    def _fail(self, error: Exception) -> None:
        """There will be no copy."""
        with self._changed:
            self._error = error
            self._under_way.pop(threading.get_ident(), None)
        self._drop_rest()

    def _drop_rest(self) -> None:
        with self._changed:
            self._rest.clear()
            self._steady.clear()
            self._changed.notify_all()

    def _there(self) -> int:
        """Up to which byte the copy is there: of both kinds the parts are begun in their order."""
        with self._changed:
            if self._error is not None:
                return 0
            next_ones = [parts[0] for parts in (self._steady, self._rest) if parts]
            left = [part.piece.offset for part in (*self._under_way.values(), *next_ones)]
            return min(left, default=self.table.bytes)

    def _copy(self, piece: Piece, tensor: torch.Tensor) -> None:
        """From a card it is only begun."""
        if not piece.bytes:
            return
        if self._shared_out and is_in_order(tensor):
            # Torch's threads would stand in each other's way, and in that of the step.
            into = self._numbers(torch.uint8).data_ptr() + piece.offset
            ctypes.memmove(into, tensor.data_ptr(), piece.bytes)  # without the interpreter's lock
            return
        size = tensor.dtype.itemsize
        whole = self._numbers(tensor.dtype)
        place = whole.narrow(0, piece.offset // size, piece.bytes // size)
        # What lies on another card than the rest would be copied on a stream of that one's.
        beside = self._stream is not None and tensor.device == self._stream.device
        place.view(tensor.shape).copy_(tensor, non_blocking=beside)

    def _numbers(self, kind: torch.dtype) -> torch.Tensor:
        """All of the copy's memory, as numbers of this kind."""
        whole = self._typed.get(kind)
        if whole is None:
            count = len(self._buffer) // kind.itemsize
            whole = self._typed[kind] = torch.frombuffer(self._buffer, dtype=kind, count=count)
        return whole


def stream_beside(
    tensors: list[torch.Tensor], computed_on: torch.cuda.Stream | None = None
) -> torch.cuda.Stream | None:
    """On which to copy them from their card, once they are what they are to be, while the next
    step is computed; None if they are on none. `computed_on`: see `Copying`."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is None:
        return None
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(computed_on or torch.cuda.current_stream(device))
    return stream


def queued_on(
    stream: torch.cuda.Stream | None,
) -> contextlib.AbstractContextManager[object]:
    """What is asked of a card within goes on this stream; of no card nothing is said.

    The stream's card is the current one meanwhile. Torch's own context alone would put another
    current one back as it ends, and a thread of ours has the first card until it says otherwise:
    each process of a node would begin to use that, and take some of its memory for good. And for
    no stream it would still begin to use a card that is there.
    """
    return contextlib.nullcontext() if stream is None else _queued_on(stream)


@contextlib.contextmanager
def _queued_on(stream: torch.cuda.Stream) -> Iterator[None]:
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def size_of(state: Any, due: Due = any_time) -> int:
    """Bytes that a copy of this state takes."""
    return Layout(state, due).table.bytes


def room_for(state: Any, due: Due = any_time) -> int:
    """Bytes of memory for such a copy and, from the next page on, for what describes it."""
    return room_of(Layout(state, due).table)


def room_of(table: Table) -> int:
    """Return the bytes of an image of this table and, from the next page on, its description.

    The description is the table as JSON. The image is rounded up to whole pages.
    """
    return aligned(table.bytes, mmap.PAGESIZE) + len(json.dumps(table.describe()))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements in their order, as a copy has them."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def size_in_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the tensor's elements, whatever memory it shares."""
    return tensor.numel() * tensor.element_size()


def state_of(staged: Staged) -> Any:
    """The state that was copied; its tensors share memory with the copy. Raises Damaged."""
    try:
        tensors = [view_of(staged.buffer, piece) for piece in staged.table.pieces]
        return decode(staged.table.skeleton, tensors)
    except Damaged:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise Damaged(f"what was saved does not make a state: {error!r}") from error


def touched(size: int) -> memoryview:
    """Memory whose pages are there: the first touch costs more than a copy into it."""
    pinned: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    memory = allocate(size, pinned=pinned)
    if size:
        torch.frombuffer(memory, dtype=torch.uint8).zero_()
    return memory


def pin(memory: memoryview) -> bool:
    """Pin `mapped` memory until it is unmapped: a card copies into it beside its kernels.

    Returns False where no card is in use, or where its driver does not pin that much. Copies still
    work then, at half the speed, and whoever asks for the copy waits for it.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    # A thread of ours has the first card until it says otherwise, and would begin to use that.
    used: Callable[[int], bool] = getattr(torch._C, "_cuda_hasPrimaryContext", bool)
    cards = range(torch.cuda.device_count())
    card = next((one for one in cards if used(one)), 0)
    with torch.cuda.device(card):
        failed = int(runtime.cudaHostRegister(address, len(memory), _FOR_ALL_CARDS))

    def unpin() -> None:
        with torch.cuda.device(card):
            runtime.cudaHostUnregister(address)

    if failed:
        log.warning("not_pinned bytes=%s error=%s", len(memory), failed)
    else:  # before anything else may fail: what is unmapped pinned is refused where it lay
        area: Any = memory.obj
        area.before_unmapping = unpin
    with torch.cuda.device(card):
        # A process's first stream takes a pool of them, for which no save should wait.
        torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return not failed


def allocate(size: int, *, pinned: bool = False) -> memoryview:
    """Memory for a copy, untouched."""
    if pinned:
        return bytes_of(torch.empty(size, dtype=torch.uint8, pin_memory=True))
    return pages(size)


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


def slices_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The same of a tensor of any size: from a card slice by slice, for torch never gives back what
    it has pinned, and the first is there sooner."""
    parts = [tensor]
    if tensor.is_cuda:
        parts = list(torch.split(tensor.reshape(-1), SLICE_BYTES // tensor.element_size()))
    return map(bytes_of, parts)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Itself, or a copy of what is on a card. Nothing may be about to write it, on any stream.

    So a reduced gradient crosses the bus only if a peer asks for it, which is after a death; the
    asking thread waits, and beside the kernels of the step under way.
    """
    if not tensor.is_cuda:
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
    with queued_on(stream):
        copy.copy_(tensor, non_blocking=True)
    stream.synchronize()
    return copy


def view_of(buffer: Buffer, piece: Piece) -> torch.Tensor:
    """A tensor where its elements lie. Raises Damaged, if these are not as many as it has."""
    dtype = getattr(torch, piece.dtype)
    count = math.prod(piece.shape)
    if piece.bytes != count * dtype.itemsize:
        raise Damaged(
            f"tensor {piece.name.removeprefix('.')}, {piece.dtype} of {piece.shape}, has "
            f"{piece.bytes} bytes, {count * dtype.itemsize} expected"
        )
    if count == 0:
        return torch.empty(piece.shape, dtype=dtype)
    flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=piece.offset)
    return flat.view(piece.shape)


def refuse_odd(tensor: torch.Tensor, name: str) -> None:
    """Raise TypeError, with the remedy, for a tensor that is more than its elements."""
    what = None
    if type(tensor) not in PLAIN:
        what = f"a {type(tensor).__name__}"
    elif tensor.is_quantized or tensor.layout != torch.strided:
        what = f"a {'quantized' if tensor.is_quantized else tensor.layout} tensor"
    elif tensor.is_meta:
        what = "a tensor without memory (on the device meta)"
    if what is not None:
        raise TypeError(
            f"state{name} is {what}, of which a copy is not known to be one; keep plain tensors in "
            "the state, from which it can be made again"
        )


def encode(state: Any, names: list[str], tensors: list[torch.Tensor]) -> Any:
    """JSON for a state; its tensors are moved to the list, in a fixed order, with their names.

    Raises TypeError, with the remedy, for what is neither a tensor nor JSON.
    """
    tied: dict[tuple[Any, ...], int] = {}

    def place_of(tensor: torch.Tensor, name: str) -> int:
        if name.startswith(TIED) and tensor.numel():
            memory = (
                *(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device),
                # The bytes alone do not say what is read from them.
                *(tensor.is_conj(), tensor.is_neg()),
            )
            if memory in tied:
                return tied[memory]
            tied[memory] = len(tensors)
        names.append(name)
        tensors.append(tensor)
        return len(tensors) - 1

    def encoded(value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            refuse_odd(value, name)
            return {"$tensor": place_of(value, name)}
        if isinstance(value, dict):
            if odd := [key for key in value if not is_key(key)]:
                raise TypeError(
                    f"state{name} has the key {odd[0]!r}; use strings or finite numbers"
                )
            pairs = [[key, encoded(item, f"{name}.{key}")] for key, item in value.items()]
            return {"$dict": pairs}
        if isinstance(value, float) and not math.isfinite(value):
            return {"$float": repr(float(value))}  # NumPy's own says more than the number
        if isinstance(value, list | tuple):
            kind = "$tuple" if isinstance(value, tuple) else "$list"
            return {kind: [encoded(item, f"{name}.{i}") for i, item in enumerate(value)]}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise TypeError(
            f"state{name} is a {type(value).__name__}; keep tensors, numbers, strings, lists, "
            "tuples and dicts in the state, or give the object state_dict() and load_state_dict()"
        )

    return encoded(state, "")


def decode(skeleton: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the state that `encode` made this skeleton of; the inverse of `encode`.

    Each {"$tensor": n} becomes `tensors[n]` itself, not a copy. What is no skeleton raises
    LookupError, TypeError, ValueError or AttributeError.
    """
    if not isinstance(skeleton, dict):
        return skeleton
    ((kind, inner),) = skeleton.items()
    if kind == "$tensor":
        if type(inner) is not int or inner < 0:
            raise LookupError(f"a tensor is said to be number {inner!r}")
        return tensors[inner]
    if kind == "$float":
        return float(inner)
    if kind == "$dict":
        return {key: decode(item, tensors) for key, item in inner}
    items = [decode(item, tensors) for item in inner]
    return tuple(items) if kind == "$tuple" else items
