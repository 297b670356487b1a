"""Large files on a real file system, past its cache."""

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.checkpoint import disk
from runtime.checkpoint.disk import BLOCK_BYTES, SECTOR_BYTES
from runtime.image import pages

SIZES = [
    0, 1, SECTOR_BYTES, SECTOR_BYTES + 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1,
    9 * BLOCK_BYTES + 3 * SECTOR_BYTES + 7,
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    handle = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield handle
    os.close(handle)


def data_of(size: int) -> memoryview:
    data = pages(size)
    data[:] = os.urandom(size)
    return data


def refused(code: int) -> object:
    def allocate(_file: int, _mode: int, _offset: int, _size: int) -> int:
        ctypes.set_errno(code)
        return -1

    return type("Libc", (), {"fallocate": staticmethod(allocate)})


@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_is_read_again(folder: int, tmp_path: Path, size: int) -> None:
    data, read = data_of(size), pages(size)

    disk.write("a", data, folder)
    disk.read("a", size, folder, lambda _offset, _block: None, read)

    assert (tmp_path / "a").read_bytes() == data
    assert read == data


def test_what_a_name_was_linked_to_stays_as_it_is(folder: int, tmp_path: Path) -> None:
    (tmp_path / "before").write_bytes(b"of an earlier checkpoint")
    (tmp_path / "a").hardlink_to(tmp_path / "before")

    disk.write("a", data_of(9), folder)

    assert (tmp_path / "before").read_bytes() == b"of an earlier checkpoint"
    assert (tmp_path / "a").stat().st_size == 9


@pytest.mark.parametrize("size", SIZES)
def test_also_where_a_file_cannot_be_made_long_at_once(
    folder: int, tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_libc", refused(errno.EOPNOTSUPP))
    data = data_of(size)

    disk.write("a", data, folder)

    assert (tmp_path / "a").read_bytes() == data


def test_no_room_is_told_before_anything_is_written(
    folder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_libc", refused(errno.ENOSPC))

    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        disk.write("a", data_of(BLOCK_BYTES), folder)

    assert (tmp_path / "a").stat().st_size == 0


def test_nothing_is_asked_for_that_is_beyond_what_is_ready(folder: int) -> None:
    asked: list[int] = []

    disk.write("a", data_of(9 * BLOCK_BYTES + 1), folder, asked.append)

    ends = [BLOCK_BYTES * number for number in range(1, 10)]
    assert sorted(asked) == [*ends, 9 * BLOCK_BYTES + 1]


def test_after_a_block_that_never_comes_no_other_is_begun(folder: int) -> None:
    asked: list[int] = []

    def ready(end: int) -> None:
        asked.append(end)
        if end >= 3 * BLOCK_BYTES:
            raise RuntimeError("there will be no more")

    with pytest.raises(RuntimeError, match="no more"):
        disk.write("a", data_of(64 * BLOCK_BYTES), folder, ready)

    assert max(asked) <= (2 + disk.REQUESTS) * BLOCK_BYTES
