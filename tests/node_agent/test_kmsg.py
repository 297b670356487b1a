"""What is read of the kernel's log: all that matters, and only what the kernel wrote itself."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from node_agent.collectors import kmsg
from node_agent.collectors.repeats import Told
from tests.node_agent.test_host_lines import LINES

XID = "NVRM: Xid (PCI:0000:1b:00): 79, pid=1, name=a, GPU has fallen off the bus."
LAST = "NVRM: the last line"


@dataclass
class Device:
    """Stands for /dev/kmsg: each read gives one record."""

    path: Path
    writer: int

    def write(self, *records: str) -> None:
        for record in records:
            os.write(self.writer, f"{record}\n".encode())


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    reader, writer = os.pipe2(os.O_DIRECT | os.O_CLOEXEC)  # what is written at once is read at once
    monkeypatch.setattr(stat, "S_ISCHR", lambda _mode: True)
    yield Device(Path(f"/proc/self/fd/{reader}"), writer)
    os.close(reader)
    os.close(writer)


def told_of(path: Path, folder: Path) -> list[str]:
    """The lines of a log that are told, up to and without its last one."""
    told: list[str] = []

    def deliver(some: list[Told]) -> None:
        told.extend(one.line for one in some)
        assert LAST not in told[-1]  # else `follow` would never return

    with pytest.raises(AssertionError):
        kmsg.follow(path, folder / "cursor", "boot", deliver, threading.Event())
    return told[:-1]


def written(path: Path, lines: Iterable[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.mark.parametrize("line", [line for *_, line in LINES])
def test_a_line_about_the_host_is_told(line: str, tmp_path: Path) -> None:
    log = written(tmp_path / "kernel.log", ["usb 1-1: new device", line, LAST])

    assert told_of(log, tmp_path) == [line]


def test_a_record_about_the_host_is_told(device: Device, tmp_path: Path) -> None:
    oom = "Memory cgroup out of memory: Killed process 7 (train) total-vm:1kB"
    device.write(f"3,1,100,-;{oom}\n SUBSYSTEM=memory", f"6,2,101,-;{LAST}")

    assert told_of(device.path, tmp_path) == [f"3,1,100,-;{oom}"]


def test_what_a_program_wrote_into_the_kernels_log_is_passed_over(
    device: Device, tmp_path: Path
) -> None:
    device.write(f"12,1,100,-;{XID}", f"4,2,101,-;{XID}", f"30,3,102,-;{XID}", f"6,4,103,-;{LAST}")

    assert told_of(device.path, tmp_path) == [f"4,2,101,-;{XID}"]


def test_what_a_program_wrote_does_not_speak_against_a_card(device: Device) -> None:
    device.write(f"12,1,100,-;{XID}", f"4,2,101,-;{XID}\n SUBSYSTEM=pci")

    assert list(kmsg.lines(device.path)) == [(2, f"4,2,101,-;{XID}".encode())]


def test_a_cursor_that_a_full_disk_refuses_is_logged_once_and_lines_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(kmsg, "write_atomically", Mock(side_effect=[full, full, None, full, full]))
    path = written(tmp_path / "kernel.log", ["NVRM: a"])
    more = iter("bcdef")
    told: list[str] = []

    def deliver(some: list[Told]) -> None:
        told.extend(one.line for one in some)
        with path.open("a") as log:
            log.write(f"NVRM: {next(more)}\n")

    with pytest.raises(StopIteration):
        kmsg.follow(path, tmp_path / "cursor", "boot", deliver, threading.Event())

    assert told == [f"NVRM: {letter}" for letter in "abcdef"]
    assert capsys.readouterr().err.count("kernel_log_cursor_not_kept") == 2


@pytest.mark.parametrize(("line", "times"), [([], 1), ([("", "NVRM: again")], 9)])
def test_the_cursor_is_written_at_once_where_something_was_read_that_matters(
    line: list[tuple[str, str]], times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Mock()
    monkeypatch.setattr(kmsg, "write_atomically", write)
    monkeypatch.setattr(kmsg, "time", SimpleNamespace(time=lambda: 1e9))
    steps = [(kmsg.Cursor("boot", number), line) for number in range(9)]
    monkeypatch.setattr(kmsg, "_steps", lambda *_: iter(steps))

    kmsg.follow(tmp_path, tmp_path / "cursor", "boot", Mock(), threading.Event())

    assert write.call_count == times


SEGFAULT = "{}[4242]: segfault at 0 ip 000055d5c0a0 sp 00007ffd2a10 error 4 in {}[55d5c0a0+1000]"
LOST = "NVRM: GPU 0000:1b:00.0: GPU has fallen off the bus."
FORGED = [
    SEGFAULT.format("train", XID),
    SEGFAULT.format("NVRM: Xid (1b:0", XID),
    SEGFAULT.format("NVRM: GPU 1b:00", "has fallen off the bus."),
    SEGFAULT.format("NVRM: ", "GPU 0000:1b:00.0: GPU has fallen off the bus."),
    SEGFAULT.format("train", "NVRM: The NVIDIA GPU 0000:1b:00.0"),
    SEGFAULT.format("train", "nvidia-nvswitch0: SXid (PCI:0000:a9:00.0): 20034, Fatal, Link 30"),
    f"oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/{XID},task=train,pid=4242,uid=1000",
    f"BTRFS warning (device sda2): checksum error at logical 1 on dev sda2 (path: {LOST})",
]


@pytest.mark.parametrize("text", FORGED)
def test_what_a_file_is_named_is_not_what_the_driver_says(
    device: Device, tmp_path: Path, text: str
) -> None:
    said = f"4,2,101,-;{LOST}"
    device.write(f"6,1,100,-;{text}", said, f"6,3,102,-;{LAST}")

    assert told_of(device.path, tmp_path) == [said]


@pytest.mark.parametrize("text", FORGED)
def test_what_a_file_is_named_does_not_speak_against_a_card(device: Device, text: str) -> None:
    device.write(f"6,1,100,-;{text}", f"4,2,101,-;{LOST}")

    assert list(kmsg.lines(device.path)) == [(2, f"4,2,101,-;{LOST}".encode())]


def test_a_log_that_cannot_be_read_is_said_once_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "later" / "kernel.log"

    def mend() -> None:
        log.parent.mkdir()
        written(log, [XID, LAST])

    attempts = iter([lambda: None, lambda: None, mend])
    clock = SimpleNamespace(time=time.time, sleep=lambda _s: next(attempts)())
    monkeypatch.setattr(kmsg, "time", clock)

    assert told_of(log, tmp_path) == [XID]
    assert capsys.readouterr().err.count("kernel_log_unreadable") == 1
