"""Follow the kernel's log, and pass on verbatim the lines that matter, each with a stable key.

A line that repeats is passed on as a count. This does not depend on NVML: a card that blocks every
NVML caller still speaks here. A cursor file keeps how far the log was read, and what was counted by
then. A line that is read twice after a crash has the same key, so it counts once. What programs
write into the kernel's log, or have the kernel print, is passed over.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from node_agent.collectors import host_lines, xid
from node_agent.collectors.repeats import Repeats, Told
from node_agent.files import write_atomically
from node_agent.log import log
from node_agent.watch import FolderWatch

#: What the driver says, and more of the machine's checks and of want of memory than `host_lines`
#: reads.
WORDS = (b"NVRM", b"Xid", b"SXid", b"nvidia", b"mce:", b"Out of memory")
#: In the agent's state folder.
CURSOR_FILE = "kernel-log-cursor.json"
#: wire.Text: what is longer is cut.
MAX_LINE = 8192
BLOCK = 65536
#: So long to the next attempt, where the log cannot be read.
RETRY_S = 10.0
#: Where nothing came that matters the cursor is written so often at most.
CURSOR_S = 5.0

#: deliver([...]): keep these lines and counts, durably, before it returns.
Deliver = Callable[[list[Told]], None]


@dataclass(frozen=True)
class Cursor:
    """How far this boot's log has been read: bytes of a file, or the last record's number."""

    boot_id: str
    offset: int = 0
    generation: int = 0  # rises when a file was cut: its offsets then mean other lines


def follow(
    path: Path, cursor_file: Path, boot_id: str, deliver: Deliver, was_reset: threading.Event
) -> None:
    """Deliver new lines of the kernel's log that matter, for ever; this function never returns.

    A log that cannot be read is reported once as an error, and tried again every RETRY_S seconds.
    `was_reset` is set by others once cards were reset: what the cards say again after that is news.

    On a full disk the cursor stays where it was. Lines that are read again then count once, as
    after a crash.
    """
    start, repeats = _load(cursor_file, boot_id)
    kept, written, written_at = True, dict[str, Any](), 0.0

    def wait_s() -> float | None:
        return repeats.wait_s(time.time())

    for cursor, lines in _steps(path, start, wait_s):
        now = time.time()
        told = []
        if was_reset.is_set():
            was_reset.clear()
            told += repeats.clear(now)
        taken = [repeats.take(key, line, now) for key, line in lines]
        told += [one for one in taken if one is not None] + repeats.due(now)
        if told:
            deliver(told)
        stored = {**asdict(cursor), "repeats": repeats.state()}
        # What was only passed over costs less to read again than to write down.
        if {**written, "offset": cursor.offset} == stored and 0 <= now - written_at < CURSOR_S:
            continue
        try:
            write_atomically(cursor_file, msgspec.json.encode(stored))
            kept, written, written_at = True, stored, now
        except OSError as error:
            if kept:  # said once, not for each line
                log("kernel_log_cursor_not_kept", "error", path=cursor_file, error=str(error))
            kept = False


def position(path: Path, cursor_file: Path, boot_id: str) -> Cursor:
    """Where the log ends now, counted as the cursor of `follow` counts. OSError if unreadable."""
    if stat.S_ISCHR(path.stat().st_mode):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return Cursor(boot_id, max((number for number, _ in _all_records(fd)), default=0))
        finally:
            os.close(fd)
    generation = _load(cursor_file, boot_id)[0].generation
    return Cursor(boot_id, path.stat().st_size, generation)


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """All that the log holds now: (where it stands, counted as a cursor counts; the line)."""
    if stat.S_ISCHR(path.stat().st_mode):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            yield from _all_records(fd)
        finally:
            os.close(fd)
    else:
        at = 0
        for line in path.read_bytes().split(b"\n"):
            at += len(line) + 1
            yield at, line


def matters(line: bytes) -> bool:
    """Whether a line of the kernel's log is passed on to the control plane.

    A line is passed on if it contains one of WORDS, or if `host_lines.parse` recognises it.
    """
    return any(word in line for word in WORDS) or host_lines.parse(_text(line)) is not None


def _load(path: Path, boot_id: str) -> tuple[Cursor, Repeats]:
    fresh = Cursor(boot_id), Repeats()
    try:
        stored: dict[str, Any] = msgspec.json.decode(path.read_bytes())
        repeats = Repeats(stored.pop("repeats", []))
        cursor = Cursor(**stored)
    except FileNotFoundError:
        return fresh
    except (msgspec.DecodeError, TypeError, KeyError, AttributeError) as error:
        log("kernel_log_cursor_broken", "error", path=path, error=str(error))
        return fresh
    return (cursor, repeats) if cursor.boot_id == boot_id else fresh


Step = tuple[Cursor, list[tuple[str, str]]]
#: How long to wait for more lines before a step without any; None for ever.
Wait = Callable[[], float | None]


def _steps(path: Path, cursor: Cursor, wait_s: Wait) -> Iterator[Step]:
    """Never ends: what cannot be read is tried again, from where it was read to."""
    told = False
    while True:
        try:
            is_device = path.exists() and stat.S_ISCHR(path.stat().st_mode)
            for step in (_device if is_device else _file)(path, cursor, wait_s):
                cursor, told = step[0], False
                yield step
        except OSError as error:
            if not told:  # said once, not for each attempt
                log("kernel_log_unreadable", "error", path=path, error=str(error))
            told = True
        time.sleep(RETRY_S)


def _file(path: Path, cursor: Cursor, wait_s: Wait) -> Iterator[Step]:
    """A plain file that grows, as a simulated node has. It may be cut or replaced."""
    watch = FolderWatch(path.parent)
    try:
        while True:
            data, cursor = _read_file(path, cursor)
            whole = data.rfind(b"\n") + 1
            if whole == 0 and len(data) < BLOCK:
                if not watch.wait(wait_s()):
                    yield cursor, []
                continue
            # A block without any line end is rubbish: it passes as one long line.
            whole = whole or len(data)
            lines, at = [], cursor.offset
            for line in data[:whole].split(b"\n"):
                if matters(line):
                    lines.append((f"{cursor.generation} {at}", _text(line)))
                at += len(line) + 1
            cursor = replace(cursor, offset=cursor.offset + whole)
            yield cursor, lines
    finally:
        watch.close()


def _read_file(path: Path, cursor: Cursor) -> tuple[bytes, Cursor]:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < cursor.offset:
                cursor = replace(cursor, offset=0, generation=cursor.generation + 1)
            file.seek(cursor.offset)
            return file.read(BLOCK), cursor
    except FileNotFoundError:
        return b"", cursor


def _device(path: Path, cursor: Cursor, wait_s: Wait) -> Iterator[Step]:
    """/dev/kmsg: each read is one record, "priority,number,microseconds,flags;text"."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    last = cursor.offset
    try:
        while True:
            lines = []
            for record in _records(fd):
                number = _number(record)
                if number > last:
                    last = number
                    line = _first_line(record)
                    if _is_genuine(record) and matters(line):
                        lines.append((f"record {number}", _text(line)))
            if last != cursor.offset:
                cursor = replace(cursor, offset=last)
                yield cursor, lines
            ready, _, _ = select.select([fd], [], [], wait_s())
            if not ready:
                yield cursor, []
    finally:
        os.close(fd)


def _records(fd: int) -> Iterator[bytes]:
    """At most some hundreds of the records that are there now."""
    for _ in range(500):
        try:
            yield os.read(fd, 16384)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno == errno.EPIPE:
                log("kernel_log_overrun", "error")  # the ring turned faster than we read
            elif error.errno == errno.EINVAL:
                log("kernel_log_long_record", "error")
            else:
                raise


def _all_records(fd: int) -> Iterator[tuple[int, bytes]]:
    """Every record that is the kernel's own and is there now: its number, and its first line."""
    while batch := list(_records(fd)):
        for record in batch:
            if _is_genuine(record):
                yield _number(record), _first_line(record)


def _number(record: bytes) -> int:
    fields = record.split(b";", 1)[0].split(b",")
    return int(fields[1]) if len(fields) > 1 and fields[1].isdigit() else 0


def _first_line(record: bytes) -> bytes:
    return record.split(b"\n", 1)[0]  # what follows describes the device, indented


def _is_genuine(record: bytes) -> bool:
    """Whether the kernel wrote it itself, and its driver what the record reports of cards."""
    words = _first_line(record).partition(b";")[2]
    return _is_kernels(record) and not xid.is_forged(_text(words))


def _is_kernels(record: bytes) -> bool:
    """Whether the kernel wrote it itself: its facility, above the level's three bits, is 0, and the
    kernel lets no program write with that.
    """
    priority = record.split(b",", 1)[0]
    return priority.isdigit() and int(priority) >> 3 == 0


def _text(line: bytes) -> str:
    return line.rstrip(b"\r\n").decode(errors="replace")[:MAX_LINE]
