"""Memory that one step frees and the next takes again, kept for it.

A step's gradients and activations are freed at its end. What then lies at the top of the heap glibc
gives back to the kernel, and has to ask for page by page in the next step: for 11 MB of gradients
2,200 page faults, a twelfth of the step. To keep it needs no more memory, for each step takes as
much; only what is freed once, such as a checkpoint that was loaded, may stay with the process.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
#: At the top of the heap, after a peak that comes once.
_KEPT_BYTES = 1 << 30
#: What glibc itself comes to by and by, after it was given back such large pieces.
_MMAP_BYTES = 32 << 20
#: Who sets one of these has a mind of their own.
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Have this process keep what it frees, up to a gigabyte. False, and nothing is changed, where
    its C library is not glibc, or the environment says how it is to behave (mallopt(3))."""
    if any(os.environ.get(name) for name in _SETTINGS):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    # Either one ends glibc's own adjusting of both.
    return bool(mallopt(_MMAP_THRESHOLD, _MMAP_BYTES) and mallopt(_TRIM_THRESHOLD, _KEPT_BYTES))
