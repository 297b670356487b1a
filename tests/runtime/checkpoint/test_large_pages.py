"""Memory of a file at an address where large pages fit, and the pages themselves."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.checkpoint import copy_buffers
from runtime.checkpoint.copy_buffers import CopyBuffer, unpinned
from runtime.checkpoint.large_pages import LARGE_BYTES, collapse, mapped

SIZE = 2 * LARGE_BYTES + 4096


@pytest.fixture
def file(request: pytest.FixtureRequest) -> Iterator[int]:
    """Of memory, named after the test; all of it is there."""
    fd = os.memfd_create(request.node.name[:50])
    os.posix_fallocate(fd, 0, SIZE)
    yield fd
    os.close(fd)


def kilobytes(name: str, what: str) -> list[int]:
    """Of each mapping in this process of a file whose name holds this, as the kernel counts."""
    found, ours = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word, *rest = line.split()
        ours = name in line if "-" in word else ours
        found += [int(rest[0])] if ours and word == f"{what}:" else []
    return found


def test_what_is_mapped_is_the_file(file: int) -> None:
    written = mapped(file, SIZE, writable=True)
    read = mapped(file, SIZE, writable=False)

    written[-5:] = b"bytes"

    assert bytes(read[-5:]) == os.pread(file, 5, SIZE - 5) == b"bytes"
    assert (len(written), len(read)) == (SIZE, SIZE)
    with pytest.raises(TypeError, match="read-only"):
        read[0] = 1


def test_it_is_mapped_for_as_long_as_somebody_uses_it(
    file: int, request: pytest.FixtureRequest
) -> None:
    part = mapped(file, SIZE, writable=True)[:10]
    there = kilobytes(request.node.name[:50], "Size")
    del part
    gc.collect()

    assert there == [-(-SIZE // 1024)]
    assert kilobytes(request.node.name[:50], "Size") == []


def test_what_cannot_be_mapped_says_why(file: int) -> None:
    read_only = os.open(f"/proc/self/fd/{file}", os.O_RDONLY)

    with pytest.raises(PermissionError):
        mapped(read_only, SIZE, writable=True)

    os.close(read_only)


def can_collapse() -> bool:
    fd = os.memfd_create("probe")
    os.posix_fallocate(fd, 0, LARGE_BYTES)
    able = collapse(mapped(fd, LARGE_BYTES, writable=True))
    os.close(fd)
    return able


@pytest.mark.skipif(not can_collapse(), reason="this kernel gives shared memory no large pages")
def test_a_room_lies_in_large_pages() -> None:
    room = CopyBuffer(7, 3 * LARGE_BYTES, lambda _seconds: None, unpinned)

    assert kilobytes("drydock-copy-7", "ShmemPmdMapped") == [3 * LARGE_BYTES // 1024]
    assert not any(room.memory)


def test_a_room_in_small_pages_is_touched_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_buffers, "collapse", lambda _memory: False)

    room = CopyBuffer(8, SIZE, lambda _seconds: None, unpinned)

    assert kilobytes("drydock-copy-8", "Rss") == [SIZE // 1024]
    assert kilobytes("drydock-copy-8", "ShmemPmdMapped") == [0]
    assert not any(room.memory)
