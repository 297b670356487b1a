"""The process that holds states for a node: it starts, is found, ends, and another follows it."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import resource
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.checkpoint import holder, peer
from runtime.checkpoint.peer import Keeping
from runtime.framing import PeerFailed, receive_json
from runtime.image import Damaged
from runtime.serving import Requests
from tests.ports import free_port
from tests.runtime.checkpoint.holding import (
    PATIENCE_S,
    TOKEN,
    hold,
    in_the_middle,
    keep,
    kept,
    read,
)
from tests.runtime.checkpoint.one_rank import OneRank
from tests.runtime.checkpoint.states import flip_held_bits, staged_at
from tests.runtime.replicas import until


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "memory"
    for path in tmp_path.glob("memory/*/holder.json"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid_of(path), signal.SIGKILL)


def pid_of(path: Path) -> int:
    pid: int = json.loads(path.read_bytes())["pid"]
    return pid


def test_memory_that_went_wrong_is_named_by_tensor(folder: Path) -> None:
    address = peer.ensured(folder, "j", TOKEN, "127.0.0.1")
    keep(address, 7)
    flip_held_bits(pid_of(folder / "j" / "holder.json"))

    with pytest.raises(Damaged, match=r"rank 0, tensors base: .* not what was given to be kept"):
        read(address, 7)


def test_memory_that_went_wrong_is_not_handed_on(folder: Path) -> None:
    address = peer.ensured(folder, "j", TOKEN, "127.0.0.1")
    keeping = Keeping(address, TOKEN)
    hold(keeping, staged_at(5))
    flip_held_bits(pid_of(folder / "j" / "holder.json"))

    with pytest.raises(PeerFailed, match="held of rank 0, tensors base, is not what was received"):
        hold(keeping, staged_at(6))
    _digest, sent = hold(keeping, staged_at(7))
    keeping.close()

    assert sent == staged_at(7).table.bytes
    assert bytes(read(address, 7).buffer) == bytes(staged_at(7).buffer)


def buffers(pid: int) -> int:
    """For how many states a holder has memory."""
    return Path(f"/proc/{pid}/maps").read_text().count(f"/memfd:{holder.MEMORY}")


def test_a_job_that_is_cut_otherwise_takes_no_more_memory_than_before(folder: Path) -> None:
    address = peer.ensured(folder, "j", TOKEN, "127.0.0.1")
    pid = pid_of(folder / "j" / "holder.json")
    for step, rank in itertools.product((5, 6, 7), (0, 1)):
        keep(address, step, ranks=2, rank=rank)
    found = [buffers(pid)]

    for step in (8, 9):
        connection = in_the_middle(address, step, ranks=4)
        found.append(buffers(pid))
        connection.close()
        for rank in (0, 1):
            keep(address, step, ranks=4, rank=rank)

    assert found == [6, 5, 5]


def test_ranks_that_start_together_find_one_holder(folder: Path) -> None:
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(peer.ensured(folder, "j", TOKEN, "127.0.0.1")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)

    assert len(found) == 4
    assert set(found) == {peer.running(folder / "j")}


def test_a_holder_that_died_is_replaced_and_has_nothing(folder: Path) -> None:
    first = peer.ensured(folder, "j", TOKEN, "127.0.0.1")
    keep(first, 7)
    process = pid_of(folder / "j" / "holder.json")
    gone = os.pidfd_open(process)
    os.kill(process, signal.SIGKILL)
    select.select([gone], [], [], PATIENCE_S)

    assert peer.running(folder / "j") == ""
    assert kept(peer.ensured(folder, "j", TOKEN, "127.0.0.1")) == []


def test_it_outlives_whoever_started_it(folder: Path) -> None:
    script = "import sys; from pathlib import Path; from runtime.checkpoint import peer; "
    script += f"print(peer.ensured(Path(sys.argv[1]), 'j', {TOKEN!r}, '127.0.0.1'))"
    address = subprocess.run(
        [sys.executable, "-c", script, folder],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "DRYDOCK_PLACEMENT": "plc_1", "DRYDOCK_RANK": "0"},
    ).stdout.strip()

    keep(address, 7)
    assert read(address, 7).digest == staged_at(7).digest
    environment = Path(f"/proc/{pid_of(folder / 'j' / 'holder.json')}/environ").read_bytes()
    assert b"DRYDOCK_PLACEMENT" not in environment
    assert b"DRYDOCK_RANK" not in environment


def test_a_holder_that_dies_is_followed_by_one_at_its_address(folder: Path) -> None:
    peer.ensured(folder, "j", TOKEN, "127.0.0.1", free_port())
    own = peer.OwnHolder(folder, "j", TOKEN, "127.0.0.1")
    first = pid_of(folder / "j" / "holder.json")
    os.kill(first, signal.SIGKILL)

    def another() -> bool:
        with contextlib.suppress(FileNotFoundError):  # it takes the old one's away first
            return pid_of(folder / "j" / "holder.json") != first
        return False

    until(another, "another holder")
    keep(own.address, 7)
    assert read(own.address, 7).digest == staged_at(7).digest
    own.close()


def test_where_another_has_its_port_by_then_the_one_that_follows_is_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "AGAIN_S", 30.0)  # by then the other has it
    moved: list[str] = []
    own = peer.OwnHolder(folder, "j", TOKEN, "127.0.0.1", moved.append)
    before, process = own.address, pid_of(folder / "j" / "holder.json")
    gone = os.pidfd_open(process)
    os.kill(process, signal.SIGKILL)
    select.select([gone], [], [], PATIENCE_S)
    with socket.create_server(("127.0.0.1", int(before.rpartition(":")[2]))):
        until(lambda: moved, "another holder")

    keep(own.address, 7)
    assert read(own.address, 7).digest == staged_at(7).digest
    assert moved == [own.address]
    assert own.address != before
    own.close()


def test_whoever_starts_the_next_one_does_so_where_the_last_was(folder: Path) -> None:
    """The ranks that are there knock at its address."""
    inside = folder / "j"
    first = peer.ensured(folder, "j", TOKEN, "127.0.0.1", free_port())
    os.kill(pid_of(inside / "holder.json"), signal.SIGKILL)
    until(lambda: not peer.running(inside), "it is gone")

    assert peer.ensured(folder, "j", TOKEN, "127.0.0.1") == first


def test_where_another_has_that_port_by_now_the_next_one_takes_any(folder: Path) -> None:
    (folder / "j").mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        (folder / "j" / "holder.json").write_text(json.dumps({"address": address, "pid": 1}))
        found = peer.ensured(folder, "j", TOKEN, "127.0.0.1")

    assert found not in ("", address)


def test_a_holder_with_another_token_is_none_of_ours(folder: Path) -> None:
    """Of a job by this name that was started by hand, and comes again with a new one."""
    process = run_holder(folder, token="former")
    assert process.stdout is not None
    address = process.stdout.readline().strip()

    with pytest.raises(OSError, match=f"the holder at {address} was started with another token"):
        peer.OwnHolder(folder, "j", TOKEN, "127.0.0.1")

    process.kill()
    process.wait()


def test_while_its_rank_lives_a_holder_does_not_end(folder: Path) -> None:
    process = run_holder(folder, "--idle", "3")
    assert process.stdout is not None
    process.stdout.readline()
    own = peer.OwnHolder(folder, "j", TOKEN, "127.0.0.1")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(5.0)

    own.close()
    assert process.wait(PATIENCE_S) == 0


def test_no_other_user_has_a_way_into_the_folder(folder: Path) -> None:
    peer.ensured(folder, "j", TOKEN, "127.0.0.1")

    assert stat.S_IMODE((folder / "j").stat().st_mode) == 0o700


def open_to_all(inside: Path) -> None:
    inside.mkdir(parents=True)
    inside.chmod(0o777)


def open_to_the_group(inside: Path) -> None:
    inside.mkdir(parents=True)
    inside.chmod(0o770)


def another_place(inside: Path) -> None:
    inside.parent.mkdir()
    (inside.parent / "of-another").mkdir()
    inside.symlink_to("of-another")


@pytest.mark.parametrize("make", [open_to_all, open_to_the_group, another_place])
def test_where_others_could_put_an_address_nobody_asks_for_a_holder(
    folder: Path, make: Callable[[Path], None]
) -> None:
    """They would be told the job's token."""
    make(folder / "j")

    with pytest.raises(PermissionError, match=f"{folder}/j is of user .*: remove it, or"):
        peer.ensured(folder, "j", TOKEN, "127.0.0.1")
    _out, error = run_holder(folder).communicate(timeout=PATIENCE_S)
    assert error.startswith(f"{folder}/j is of user ")


def test_in_the_folder_of_another_user_nobody_asks_for_a_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = OneRank(tmp_path, holder=True)
    (tmp_path / "memory" / "j").mkdir(parents=True)
    ours = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: ours + 1)

    assert one.saver.open_holder("127.0.0.1") == {}
    assert one.told.troubles() == ["no_holder"]
    assert f"{tmp_path}/memory/j is of user {ours}" in one.told.messages[0].text


def test_a_holder_that_does_not_come_up_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "START_S", 0.0)
    with pytest.raises(OSError, match="no holder could be started: see"):
        peer.ensured(folder, "j", TOKEN, "127.0.0.1")


def run_holder(folder: Path, *more: str, token: str = TOKEN) -> subprocess.Popen[str]:
    arguments = ["--job", "j", "--folder", str(folder), *more]
    return subprocess.Popen(
        [sys.executable, "-m", "runtime.checkpoint.holder", *arguments],
        env={**os.environ, "DRYDOCK_TOKEN": token},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_it_ends_when_nobody_came_for_long(folder: Path) -> None:
    process = run_holder(folder, "--idle", "3")
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    requests = Requests(address, TOKEN)
    receive_json(requests.ask(op="list"))
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(5.0)  # somebody is there

    requests.close()
    assert process.wait(PATIENCE_S) == 0
    assert peer.running(folder / "j") == ""


def test_told_to_end_it_takes_what_those_who_are_there_save_at_their_own(folder: Path) -> None:
    process = run_holder(folder)
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    keeping = Keeping(address, TOKEN)
    hold(keeping, staged_at(6))

    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)
    digest, _sent = hold(keeping, staged_at(7))
    keeping.close()

    assert digest == staged_at(7).digest
    assert process.wait(PATIENCE_S) == 0
    assert peer.running(folder / "j") == ""


def test_told_to_end_it_does_at_once_where_nobody_is_there(folder: Path) -> None:
    process = run_holder(folder)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)

    assert process.wait(PATIENCE_S) == 0


def test_a_second_one_says_that_it_is_not_needed(folder: Path) -> None:
    peer.ensured(folder, "j", TOKEN, "127.0.0.1")

    _out, error = run_holder(folder).communicate(timeout=PATIENCE_S)
    assert "a holder runs in" in error


def test_who_looks_whether_there_is_one_keeps_none_from_starting(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(exist_ok=True)
    looks = os.open(folder / holder.LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(looks, fcntl.LOCK_SH)
    monkeypatch.setattr(time, "sleep", lambda _seconds: os.close(looks))

    lock = holder.hold_alone(folder)
    holder.announce(folder, "there:1")

    assert peer.running(folder) == "there:1"
    os.close(lock)


def test_without_a_token_it_does_not_start(folder: Path) -> None:
    _out, error = run_holder(folder, token="").communicate(timeout=PATIENCE_S)
    assert "give the job's token in DRYDOCK_TOKEN" in error


def test_a_rank_waits_a_bounded_time_for_another_that_starts_the_holder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one may have been stopped."""
    monkeypatch.setattr(peer, "TURN_S", 0.2)
    (folder / "j").mkdir(parents=True)
    with (folder / "j" / "starting.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        with pytest.raises(TimeoutError, match=r"another rank starts a holder for 0\.2 s"):
            peer.ensured(folder, "j", TOKEN, "127.0.0.1")


def test_the_turn_to_start_the_holder_ends_though_a_child_was_forked_meanwhile(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the lock's file open for as long as it lives."""
    left: list[int] = []

    def started(inside: Path, job: str, *_given: Any) -> str:
        lock = (inside / job / "starting.lock").stat()
        ours = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
        left.extend(os.dup(fd) for fd in ours if is_file(fd, lock))
        return "here:1"

    monkeypatch.setattr(peer, "_started", started)
    monkeypatch.setattr(peer, "TURN_S", 0.2)

    found = [peer.ensured(folder, "j", TOKEN, "127.0.0.1") for _ in range(2)]
    for fd in left:
        os.close(fd)

    assert found == ["here:1"] * 2
    assert len(left) > 1


def is_file(fd: int, other: os.stat_result) -> bool:
    with contextlib.suppress(OSError):  # the one by which the folder was listed
        return os.path.samestat(os.fstat(fd), other)
    return False


def test_a_holder_is_started_where_a_rank_has_many_files_open(folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    many = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]  # select() knows 1024
    try:
        address = peer.ensured(folder, "j", TOKEN, "127.0.0.1")
    finally:
        for fd in many:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert address.startswith("127.0.0.1:")
