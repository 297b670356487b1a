"""Large files are written and read past the page cache, where the file system allows it.

The page cache would hold a checkpoint that nobody reads, in place of data that somebody does. And
what is read back from the cache says nothing about the disk. Imports no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from runtime.checkpoint.manifest import Run
from runtime.checkpoint.meter import Meter
from runtime.checkpoint.threads import run_in_threads
from runtime.image import CHUNK_BYTES, Buffer, aligned, pages

#: Bytes of one request. Disks and networks reach their speed with it.
BLOCK_BYTES = 4 << 20
#: The same, where what is read goes nowhere, and how many such requests are under way at once: each
#: has memory of its own then, and writers of several tiers may read back at once. Two of two chunks
#: reach a disk's speed; four of one, in as much memory, were seen to reach half of it and less.
LOOKED_AT_BYTES, LOOKS = 2 * CHUNK_BYTES, 2
#: And of what is packed, where as much again goes to packing and unpacking it.
PACKED_BYTES = 1 << 20
#: What O_DIRECT demands of memory, offset and length.
SECTOR_BYTES = 4096
#: Requests under way at once: one alone leaves a disk waiting until whoever made it gets a
#: processor again, which beside a training job takes as long as the request.
REQUESTS = 4
#: What is read whole describes something: of 4 TiB in a million tensors that takes 0.3 GB.
MOST_SMALL = 1 << 30
#: How a disk says that there is no room.
FULL = (errno.ENOSPC, errno.EDQUOT)
#: How a file system says that it does not know O_DIRECT.
_UNKNOWN = (errno.EINVAL, errno.EOPNOTSUPP)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


def all_there(_end: int) -> None:
    """Nobody has to wait."""


def write(
    name: str,
    data: memoryview,
    folder: int,
    ready: Callable[[int], object] = all_there,
    meter: Meter | None = None,
) -> None:
    """Create a file in an open folder, and return once it is durable. Raises OSError.

    `data` begins at a page. `ready` is called with the end of each block of it before that is
    written, on any thread, and returns once it may be; what it raises is raised. `meter` measures
    how long the disk takes.
    """
    meter = meter or Meter()
    file, direct = _create(name, folder)
    try:
        whole = len(data) - len(data) % SECTOR_BYTES if direct else len(data)
        # A file system lets one request at a time make a file longer, but several fill it.
        several = _allocate(file, len(data)) and direct

        def one(block: tuple[int, int]) -> None:
            start, end = block
            ready(end)
            with meter.request(end - start):
                _put(file, data[start:end], start)

        run_in_threads(one, blocks(whole), REQUESTS if several else 1, "drydock-write")
        if whole < len(data):
            ready(len(data))
            _without_direct(file)
            _put(file, data[whole:], whole)
        with meter.request():
            os.fsync(file)
    finally:
        os.close(file)


def write_pieces(
    name: str, pieces: Iterable[Buffer | bytes], most: int, folder: int, meter: Meter | None = None
) -> int:
    """The same of bytes that come one after another, `most` at most; how many they were. The next
    piece is taken on any thread, by one at a time; what that raises is raised."""
    meter = meter or Meter()
    file, direct = _create(name, folder)
    rooms = [pages(PACKED_BYTES) for _ in range(REQUESTS)]
    size = 0
    rest: list[tuple[int, bytes]] = []  # where the file ends, what is no whole sector

    def filled() -> Iterator[tuple[int, int, memoryview]]:
        """There is a room for each thread that writes, and whoever takes the next does not."""
        nonlocal size
        room, full = rooms.pop(), 0
        for piece in pieces:
            left = memoryview(piece)
            while left:
                part = left[: len(room) - full]
                room[full : full + len(part)] = part
                left, full, size = left[len(part) :], full + len(part), size + len(part)
                if full == len(room):
                    yield size - full, full, room
                    room, full = rooms.pop(), 0
        yield size - full, full, room

    def one(block: tuple[int, int, memoryview]) -> None:
        start, length, room = block
        whole = length - length % SECTOR_BYTES if direct else length
        with meter.request(whole):
            _put(file, room[:whole], start)
        if whole < length:
            rest.append((start + whole, bytes(room[whole:length])))
        rooms.append(room)

    try:
        several = direct and _may_allocate(file, most)
        run_in_threads(one, filled(), REQUESTS if several else 1, "drydock-write")
        if rest:
            _without_direct(file)
        for start, data in rest:
            _put(file, memoryview(data), start)
        os.ftruncate(file, size)
        with meter.request():
            os.fsync(file)
    finally:
        os.close(file)
    return size


def _create(name: str, folder: int) -> tuple[int, bool]:
    """A new file to be written, and whether that is past the page cache. What has its name is not
    written to: who died here before may have linked it, and other checkpoints have it too."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    _unlink(name, folder)
    try:
        return os.open(name, flags | os.O_DIRECT, 0o644, dir_fd=folder), True
    except OSError as error:
        if error.errno not in _UNKNOWN:
            raise
    _unlink(name, folder)  # a kernel may have made it before it said that it knows no such way
    return os.open(name, flags, 0o644, dir_fd=folder), False


def _unlink(name: str, folder: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def _put(file: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(file, data, offset)
        data, offset = data[count:], offset + count


def _allocate(file: int, size: int) -> bool:
    """Make the file that long, where the file system can without writing it. Raises OSError: most
    of all if there is no room for it.

    Not posix_fallocate(3), which elsewhere writes to every block, over a network one by one.
    """
    if size and _libc.fallocate(file, 0, 0, size):
        code = ctypes.get_errno()
        if code in (*_UNKNOWN, errno.ENOSYS):
            return False
        raise OSError(code, os.strerror(code))
    return True


def _may_allocate(file: int, most: int) -> bool:
    """The same of what may become shorter: that there is no room for all of it is no error."""
    try:
        return _allocate(file, most)
    except OSError:
        return False


def read(
    name: str,
    size: int,
    folder: int,
    work: Callable[[int, memoryview], None],
    into: memoryview | None = None,
) -> None:
    """Read a file of just that size from the disk itself, several blocks at once; `work` is called
    with each block's offset and bytes, on any thread and in any order.

    The bytes go to `into`, which begins at a page, or else nowhere else. Raises OSError; EOFError
    if the file is shorter or longer; what `work` raises.
    """
    file = _open_to_read(name, folder)
    try:
        _demand_size(file, size)
        room = threading.local()
        longest, requests = (LOOKED_AT_BYTES, LOOKS) if into is None else (BLOCK_BYTES, REQUESTS)

        def one(limits: tuple[int, int]) -> None:
            start, end = limits
            whole = (end - start) % SECTOR_BYTES == 0
            if into is not None and whole:
                block = into[start:end]
                _fill(file, block, start)
            else:
                if not hasattr(room, "memory"):
                    room.memory = pages(longest)
                block = room.memory[: end - start]
                _fill(file, room.memory[: aligned(end - start, SECTOR_BYTES)], start, end)
                if into is not None:
                    into[start:end] = block
            work(start, block)

        run_in_threads(one, blocks(size, longest), requests, "drydock-read")
    finally:
        os.close(file)


def read_runs(
    name: str,
    size: int,
    folder: int,
    runs: Iterable[Run],
    work: Callable[[Run, memoryview], None],
) -> None:
    """The same, in runs of its chunks, none longer than PACKED_BYTES; the bytes go nowhere
    else. Raises as `read` does."""
    file = _open_to_read(name, folder)
    try:
        _demand_size(file, size)
        room = threading.local()

        def one(run: Run) -> None:
            if not hasattr(room, "memory"):
                room.memory = pages(PACKED_BYTES + 2 * SECTOR_BYTES)
            before = run.start % SECTOR_BYTES
            needed = aligned(before + run.end - run.start, SECTOR_BYTES)
            _fill(file, room.memory[:needed], run.start - before, run.end)
            work(run, room.memory[before : before + run.end - run.start])

        run_in_threads(one, runs, REQUESTS, "drydock-read")
    finally:
        os.close(file)


def _demand_size(file: int, size: int) -> None:
    """Raises EOFError."""
    if (found := os.fstat(file).st_size) != size:
        raise EOFError(f"it has {found} bytes, {size} expected")


class NoFile(OSError):
    """The path is not a regular file, or the file is too large; a retry would not help."""


def read_small(path: Path | str, folder: int | None = None) -> bytes:
    """All of a file, in a folder that is open. Raises OSError, also if it is none: of what lies in
    its place nobody waits for a word that may never come."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK, dir_fd=folder)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise NoFile(errno.EINVAL, "it is no regular file", str(path))
        if found.st_size > MOST_SMALL:
            why = f"it has {found.st_size:,} bytes, expected are {MOST_SMALL:,} at most"
            raise NoFile(errno.EFBIG, why, str(path))
        with os.fdopen(file, "rb", closefd=False) as opened:
            return opened.read()
    finally:
        os.close(file)


def _open_to_read(name: str, folder: int) -> int:
    flags = os.O_RDONLY | os.O_NONBLOCK  # see `read_small`
    try:
        return os.open(name, flags | os.O_DIRECT, dir_fd=folder)
    except OSError as error:
        if error.errno not in _UNKNOWN:
            raise
    file = os.open(name, flags, dir_fd=folder)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    return file


def _fill(file: int, into: memoryview, offset: int, end: int | None = None) -> None:
    """Until `into` is full, or the file's `end` is reached."""
    end = offset + len(into) if end is None else end
    while offset < end:
        count = os.preadv(file, [into], offset)
        if not count:
            raise EOFError("it became shorter while it was read")
        into = into[count:]
        offset += count


def _without_direct(file: int) -> None:
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT)


def blocks(size: int, longest: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) byte ranges that cover `size` bytes, each of `longest` bytes at most.

    Only the last one may be shorter; there is none for size 0.
    """
    for start in range(0, size, longest):
        yield start, min(start + longest, size)
