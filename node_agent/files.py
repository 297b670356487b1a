"""Files that survive a crash: whole-file replacement, an append-only journal of JSON lines, and a
lock that is gone with whoever held it.

Never leaves a half-written file under its real name, and never reads a torn line as a whole one.
Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from node_agent.log import log


def write_atomically(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace `path` by `data`, durable on return. Raises OSError; the old content then stands."""
    temporary = path.with_name(path.name + ".new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        os.fchmod(fd, mode)
        _write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a creation or a rename in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class TakenByAnother(Exception):
    """Another process has the file; the message is its pid."""


def take_alone(path: Path) -> int:
    """Have `path` to ourselves until this process is gone. Raises TakenByAnother.

    The kernel lets go of it when we die, however we die: a lock left behind is nobody's. Returns
    the descriptor that holds it; whoever closes it lets go.
    """
    fd = _open(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        pid = os.pread(fd, 20, 0).decode().strip()
        os.close(fd)
        raise TakenByAnother(pid or "not yet written") from error
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:  # a disk that is full or read-only: the lock holds all the same
        log("lock_without_pid", "warning", path=path, error=str(error))
    return fd


class Journal:
    """An append-only file of JSON objects, one per line; each append is durable on return.

    A torn last line (the writer was killed in the middle) is cut off when the file is opened: its
    append never returned, so nobody relies on it. A broken line elsewhere is logged and left out.
    Where the disk is read-only it can be read, and each append fails until that is mended.
    Not safe for several threads at once; the owner holds a lock.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = _open(path)
        self._size = os.fstat(self._fd).st_size

    def load(self) -> list[dict[str, Any]]:
        """All whole entries, oldest first; cuts off a torn tail."""
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            log("journal_torn_tail", "warning", path=self.path, bytes=len(data) - whole)
            if not self._read_only:
                os.ftruncate(self._fd, whole)
        self._size = whole
        entries = []
        for number, line in enumerate(data[:whole].splitlines(), start=1):
            entry = _parse(line)
            if entry is None:
                log("journal_broken_line", "error", path=self.path, line=number)
            else:
                entries.append(entry)
        return entries

    def append(self, entries: Iterable[dict[str, Any]]) -> None:
        """Add entries with one write and one fsync. On OSError none of them is in the file."""
        data = _encode(entries)
        if self._read_only:
            self._open_to_write()
        try:
            _write_all(self._fd, data)
            os.fsync(self._fd)
        except OSError:
            # A half-written line must not be glued to the next append.
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)

    def rewrite(self, entries: Iterable[dict[str, Any]]) -> None:
        """Replace the whole content, atomically. On OSError all that was appended still stands."""
        data = _encode(entries)
        temporary = self.path.with_name(self.path.name + ".new")
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()  # what a process left that died
        fd = _appended_to(temporary)
        try:
            _write_all(fd, data)
            os.fsync(fd)
            temporary.replace(self.path)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                temporary.unlink()  # it may be what fills the disk
            raise
        # Nothing is opened after the rename: what is appended must never go to a file without name.
        os.close(self._fd)
        self._fd, self._size = fd, len(data)
        sync_folder(self.path.parent)

    def close(self) -> None:
        os.close(self._fd)

    @property
    def _read_only(self) -> bool:
        return fcntl.fcntl(self._fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY

    def _open_to_write(self) -> None:
        """The disk may have been mended. Raises OSError if it was not."""
        fd = _appended_to(self.path)
        os.ftruncate(fd, self._size)
        os.close(self._fd)
        self._fd = fd


def _open(path: Path) -> int:
    """As `_appended_to`; where the disk is read-only, to read what is there."""
    try:
        return _appended_to(path)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _appended_to(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _encode(entries: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
