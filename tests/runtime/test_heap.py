"""What a step frees is there for the next, without a page fault for each page of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

STEPS = 20
PIECES, BYTES = 6, 8_000_000
PAGES = STEPS * PIECES * BYTES // 4096
#: Each step takes some pieces of memory, writes to them, and frees them.
SCRIPT = f"""
import ctypes, resource
from runtime.replica.heap import keep_freed_memory

kept = KEEP and keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
def step():
    pieces = [libc.malloc({BYTES}) for _ in range({PIECES})]
    for piece in pieces:
        libc.memset(ctypes.c_void_p(piece), 1, {BYTES})
    for piece in pieces:
        libc.free(ctypes.c_void_p(piece))
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
before = faults()
for _ in range({STEPS}):
    step()
print(kept, faults() - before)
"""


def played(*, keep: bool, **environment: str) -> tuple[bool, int]:
    """Whether it was asked of the C library; page faults of all steps together."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    said = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("KEEP", str(keep))],
        env={**clean, **environment},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    return said[0] == "True", int(said[1])


def test_freed_memory_is_kept() -> None:
    _, without = played(keep=False)
    kept, faults = played(keep=True)

    assert kept
    assert faults < PAGES / 100
    assert without > PAGES / 2


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"])
def test_the_environment_has_the_last_word(name: str) -> None:
    kept, _ = played(keep=True, **{name: "131072"})

    assert not kept
