"""Memory that is at hand. Imports no torch.

A virtual machine gives back to its host what nobody uses, within seconds (Linux: free page
reporting), and has it again only at the first touch, at a third to one gigabyte a second: slower
than a disk reads. Whose turn comes after a rest would pay for that, and it is no contender's doing.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import psutil

MOST_OF_FREE = 0.8


def have_at_hand(size: int) -> None:
    """Use so many bytes once, or most of what is free, and give them back."""
    size = min(size, int(psutil.virtual_memory().available * MOST_OF_FREE))
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        with contextlib.suppress(OSError):  # a kernel without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        ctypes.memset((ctypes.c_char * size).from_buffer(memory), 1, size)
