"""Shared memory in large pages, where the kernel has any to give.

A disk reads twice as fast from pages of 2 MiB as from those of 4 KiB that a memfd has, and a copy
into them is quicker. Linux puts such pages together when asked to (MADV_COLLAPSE, since 6.1), if
they are mapped at a multiple of their size; where it cannot, all goes on in small ones. Imports no
torch.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable

LARGE_BYTES = 2 << 20  # on x86-64, and on ARM with pages of 4 KiB
#: linux/mman.h; Python does not name them.
_MAP_FIXED, _MAP_NORESERVE, _MADV_COLLAPSE = 0x10, 0x4000, 25
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Area(mmap.mmap):
    """Memory of which somebody has to be told before it is unmapped."""

    before_unmapping: Callable[[], object] = staticmethod(lambda: None)

    def __del__(self) -> None:
        self.before_unmapping()


def mapped(fd: int, size: int, *, writable: bool) -> memoryview:
    """The first `size` bytes of a file, where large pages can be mapped; until nobody uses it.

    Raises OSError.
    """
    # More than is needed, of which the file takes the place: so it is unmapped with the rest.
    unused = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    area = Area(-1, size + LARGE_BYTES, flags=unused)
    first = _address(area)
    start = -first % LARGE_BYTES
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    how = mmap.MAP_SHARED | _MAP_FIXED
    if _libc.mmap(first + start, size, protection, how, fd, 0) == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = memoryview(area)[start : start + size]
    return memory if writable else memory.toreadonly()


def collapse(memory: memoryview) -> bool:
    """Put together the pages of a part of what is `mapped`, all of which are there, and map them.
    False if that is not to be had."""
    failed: int = _libc.madvise(_address(memory), len(memory), _MADV_COLLAPSE)
    return failed == 0


def emptied(memory: memoryview) -> bool:
    """Give what is `mapped`, to be written, back to the system: it holds zeros from now on, for all
    who have it mapped. False if that is not to be had."""
    failed: int = _libc.madvise(_address(memory), len(memory), mmap.MADV_REMOVE)
    return failed == 0


def _address(memory: mmap.mmap | memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
