"""What a holder keeps of peers' states: the newest that came whole, for who knows the token."""

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
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import framing, serving
from runtime.checkpoint import holder, memory_left, peer
from runtime.checkpoint.holder import Buffer, Holder, Label
from runtime.checkpoint.peer import Keepers, Keeping, Place, holder_for, in_turn
from runtime.framing import PeerFailed, receive_json, send_chunk, send_json
from runtime.image import CHUNK_BYTES, Damaged, Staged, chunks_of
from runtime.serving import Requests, RequestServer
from tests.runtime.checkpoint.states import SOON_S, flip_held_bits, staged_at
from tests.runtime.replicas import until

TOKEN = "right"
PATIENCE_S = 30.0


@pytest.fixture
def here() -> Holder:
    """The one at `address`, whose memory can be looked into."""
    return Holder()


@pytest.fixture
def address(here: Holder) -> Iterator[str]:
    server = RequestServer("127.0.0.1", TOKEN, here.serve, idle_s=None)
    yield server.address
    server.close()


def label(step: int, **more: Any) -> Label:
    plain: dict[str, Any] = {"run": "r", "rank": 0, "ranks": 1, "epoch": 1, "save": f"save{step}"}
    return Label(**{**plain, "step": step, "bytes": staged_at(step).table.bytes, **more})


def hold(keeping: Keeping, staged: Staged, **more: Any) -> tuple[str, int]:
    """Its digest, and how many bytes were sent."""
    image = memoryview(staged.buffer)
    kept = more.pop("kept", None)
    return keeping.hold(label(staged.step, **more), staged.table, {"job": "j"}, image, kept)


def keep(address: str, step: int, *, token: str = TOKEN, **more: Any) -> str:
    """Have the state of this step kept there; its digest."""
    staged = staged_at(step)
    keeping = Keeping(address, token)
    try:
        digest, _sent = hold(keeping, staged, **more)
        return digest
    finally:
        keeping.close()


def kept(address: str) -> list[tuple[int, int]]:
    """Ranks and steps."""
    return [(one["rank"], one["step"]) for one in peer.held(address, TOKEN)]


def read(address: str, step: int, rank: int = 0) -> Staged:
    """What is listed there of that step."""
    listed = {(one["rank"], one["step"]): one["digest"] for one in peer.held(address, TOKEN)}
    return peer.read(address, TOKEN, rank, f"save{step}", listed.get((rank, step), ""))


def test_what_is_kept_comes_back_bit_for_bit(address: str) -> None:
    digest = keep(address, 7)

    found = read(address, 7)
    assert (found.step, found.digest) == (7, digest)
    assert digest == staged_at(7).digest
    assert bytes(found.buffer) == bytes(staged_at(7).buffer)
    (listed,) = peer.held(address, TOKEN)
    assert (listed["digest"], listed["facts"], listed["run"]) == (digest, {"job": "j"}, "r")


def test_the_newest_is_kept_and_the_next_is_received_beside_it(address: str) -> None:
    for step in (5, 6, 7):
        keep(address, step)

    assert kept(address) == [(0, 7)]
    with pytest.raises(PeerFailed, match="no save save6 of rank 0 is held here"):
        read(address, 6)


def files() -> int:
    """That this process has open."""
    return len([*Path("/proc/self/fd").iterdir()])


def test_no_memory_is_begun_that_there_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_left, "left_bytes", lambda: 1 << 20)
    before = files()

    with pytest.raises(MemoryError, match="2097152 more are needed, and at most 1048576 are left"):
        Buffer(2 << 20)
    assert Buffer(1 << 20).size == 1 << 20
    assert files() == before


def test_of_a_state_of_several_parts_the_one_before_is_kept_too(address: str) -> None:
    for step in (5, 6, 7):
        keep(address, step, ranks=2)
    keep(address, 6, ranks=2, rank=1)

    assert sorted(kept(address)) == [(0, 6), (0, 7), (1, 6)]
    assert read(address, 6, rank=1).digest == read(address, 6).digest


def test_frozen_weights_are_sent_once(address: str) -> None:
    keeping = Keeping(address, TOKEN)
    sent = [hold(keeping, staged_at(step))[1] for step in (5, 6, 7)]
    keeping.close()

    whole, frozen = staged_at(7).table.bytes, staged_at(7).table.frozen
    assert 0 < frozen < whole
    assert sent == [whole, whole - frozen, whole - frozen]
    assert bytes(read(address, 7).buffer) == bytes(staged_at(7).buffer)


def test_frozen_weights_that_did_change_are_sent(address: str) -> None:
    keeping = Keeping(address, TOKEN)
    hold(keeping, staged_at(5))
    changed = staged_at(6)
    memoryview(changed.buffer)[CHUNK_BYTES] ^= 1
    _digest, sent = hold(keeping, changed)
    keeping.close()

    assert sent == changed.table.bytes - CHUNK_BYTES
    assert bytes(read(address, 6).buffer) == bytes(changed.buffer)


def test_frozen_weights_that_another_gave_meanwhile_are_not_taken_for_ours(address: str) -> None:
    keeping = Keeping(address, TOKEN)
    hold(keeping, staged_at(5))
    other = staged_at(6)
    memoryview(other.buffer)[0] ^= 1
    hold(Keeping(address, TOKEN), other, save="another")
    _digest, sent = hold(keeping, staged_at(7))
    keeping.close()

    assert sent == staged_at(7).table.bytes
    assert bytes(read(address, 7).buffer) == bytes(staged_at(7).buffer)


@pytest.mark.parametrize("same", [-1, 3, 1000])
def test_no_other_chunks_than_frozen_ones_are_taken_from_before(address: str, same: int) -> None:
    keep(address, 5)
    connection = Requests(address, TOKEN).ask(op="hold", **vars(label(6)))
    receive_json(connection)
    send_json(connection, {"table": staged_at(6).table.describe(), "facts": {}, "same": same})

    with pytest.raises(PeerFailed, match="chunks are not frozen in what is held"):
        receive_json(connection)
    assert kept(address) == [(0, 5)]


def test_what_breaks_off_leaves_the_one_before(address: str) -> None:
    keep(address, 5)
    requests = Requests(address, TOKEN)
    connection = requests.ask(op="hold", **vars(label(6)))
    assert receive_json(connection) == {"newest": "save5"}
    requests.close()

    keep(address, 7)  # which waits for the broken one
    assert read(address, 7).digest == staged_at(7).digest


def in_the_middle(address: str, step: int, **more: Any) -> socket.socket:
    """A connection of a replica that has sent the first chunk of a state, and its table."""
    staged = staged_at(step)
    connection = Requests(address, TOKEN).ask(op="hold", **vars(label(step, **more)))
    receive_json(connection)
    send_json(connection, {"table": staged.table.describe(), "facts": {}, "same": 0})
    receive_json(connection)
    send_chunk(connection, next(chunks_of(staged.buffer)))
    return connection


def test_who_waits_for_a_state_that_another_replica_sends_slowly_is_not_given_up(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[dict[str, Any]] = []
    monkeypatch.setattr(peer, "SILENT_S", SOON_S)
    monkeypatch.setattr(holder, "SIGN_S", SOON_S / 10)

    def noted(connection: socket.socket) -> dict[str, Any]:
        heard.append(receive_json(connection))
        return heard[-1]

    monkeypatch.setattr(peer, "receive_json", noted)
    first = in_the_middle(address, 7)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(keep, address, 7)
        until(lambda: len(heard) > 15 or second.done(), "longer than it would hear nothing")
        given_up = second.done()
        for chunk in [*chunks_of(staged_at(7).buffer)][1:]:
            send_chunk(first, chunk)
        digest = second.result(PATIENCE_S)

    assert not given_up
    assert digest == staged_at(7).digest
    assert heard[-1] == {"held": digest}
    assert receive_json(first) == {"held": digest}
    first.close()


def test_who_waits_for_a_state_of_which_no_more_comes_takes_over(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder, "SILENT_S", SOON_S)
    monkeypatch.setattr(holder, "SIGN_S", SOON_S / 10)
    first = in_the_middle(address, 7)
    waited = keep(address, 7)

    assert waited == staged_at(7).digest
    with pytest.raises(PeerFailed, match="timed out"):
        receive_json(first)
    first.close()


def test_of_two_replicas_with_one_state_the_second_need_not_send_it(address: str) -> None:
    digests = [keep(address, 7), keep(address, 7)]

    assert digests == [staged_at(7).digest] * 2
    assert kept(address) == [(0, 7)]


def test_two_replicas_whose_states_differ_are_told(address: str) -> None:
    keep(address, 7)
    other = staged_at(8)

    with pytest.raises(Damaged, match="ours is"):
        Keeping(address, TOKEN).hold(label(7), other.table, {}, memoryview(other.buffer))


def test_what_comes_without_its_facts_holds_up_nobody(address: str) -> None:
    staged = staged_at(7)
    requests = Requests(address, TOKEN)
    connection = requests.ask(op="hold", **vars(label(7)))
    assert receive_json(connection) == {"newest": ""}
    send_json(connection, {"table": staged.table.describe(), "same": 0})
    assert receive_json(connection) == {"copied": 0, "all": True}
    for chunk in chunks_of(staged.buffer):
        send_chunk(connection, chunk)
    with pytest.raises(PeerFailed, match="facts"):
        receive_json(connection)

    assert keep(address, 7) == staged.digest


def test_a_table_that_went_wrong_in_memory_is_neither_given_nor_taken_for_ours(
    address: str, here: Holder
) -> None:
    """Learning rates and counters lie in it, and no chunk."""
    keep(address, 7)
    (held,) = here.memory.listed()
    held.table.skeleton["$dict"].pop()

    for ask in (lambda: read(address, 7), lambda: keep(address, 7)):
        with pytest.raises(PeerFailed, match="rank 0, step 7, is described otherwise than when"):
            ask()
    assert keep(address, 8) == staged_at(8).digest


def test_another_state_than_was_asked_for_is_not_taken(
    address: str, here: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(address, 7)
    (held,) = here.memory.listed()
    monkeypatch.setattr(here.memory, "take", lambda _rank, _save, _digest: held)

    with pytest.raises(Damaged, match="take another copy"):
        peer.read(address, TOKEN, 0, "save7", staged_at(8).digest)


def said_of(staged: Staged) -> int:
    """How many bytes a holder is told of a state beside its chunks."""
    said = {"table": staged.table.describe(), "facts": {"job": "j"}, "same": 0}
    return len(json.dumps(said))


def test_what_is_held_can_be_given_back_however_much_is_said_of_it(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framing, "MAX_JSON", said_of(staged_at(7)))
    keep(address, 7)

    assert bytes(read(address, 7).buffer) == bytes(staged_at(7).buffer)


def test_of_what_more_is_said_than_a_peer_takes_is_refused_and_holds_up_nobody(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(framing, "MAX_JSON", said_of(staged_at(7)) - 1)
        with pytest.raises(PeerFailed, match=r"and a peer takes .* at most: divide the state"):
            keep(address, 7)

    assert keep(address, 7) == staged_at(7).digest


def answering(answer: Any) -> RequestServer:
    """A holder that answers whatever is asked so."""
    return RequestServer(
        "127.0.0.1", TOKEN, lambda connection, _request: send_json(connection, answer)
    )


@pytest.mark.parametrize(
    "answer", [{}, {"held": None}, {"held": ["save7"]}, {"held": [{"rank": 0}]}, {"step": "none"}]
)
def test_a_holder_of_another_version_fails_as_one_that_does_not_answer(answer: Any) -> None:
    server = answering(answer)

    for ask in (lambda: peer.held(server.address, TOKEN),
                lambda: peer.read(server.address, TOKEN, 0, "save7", "")):  # fmt: skip
        with pytest.raises(PeerFailed, match=f"holder {server.address} is of another version"):
            ask()
    server.close()


def test_an_answer_that_is_no_object_is_no_description() -> None:
    server = answering(["held"])

    with pytest.raises(PeerFailed, match="is no description"):
        peer.held(server.address, TOKEN)
    server.close()


def test_who_is_late_does_not_replace_what_is_newer(address: str) -> None:
    keep(address, 3, epoch=2)

    with pytest.raises(PeerFailed, match="a later one is held: step 3"):
        keep(address, 7, epoch=1)
    assert kept(address) == [(0, 3)]


@pytest.mark.parametrize("anew", [{"run": "other"}, {"ranks": 2}])
def test_what_is_held_stays_while_a_job_that_began_anew_has_given_nothing_whole(
    address: str, anew: dict[str, Any]
) -> None:
    keep(address, 7)
    in_the_middle(address, 1, **anew).close()

    assert kept(address) == [(0, 7)]
    assert bytes(read(address, 7).buffer) == bytes(staged_at(7).buffer)


def test_a_job_that_began_anew_finds_nothing_of_before_once_its_own_is_whole(address: str) -> None:
    keep(address, 7)
    keep(address, 1, run="other")

    assert kept(address) == [(0, 1)]


def test_of_a_job_that_is_cut_otherwise_the_last_state_stays_until_two_of_each_part_can_be_there(
    address: str,
) -> None:
    """Of the first one part may never come."""
    keep(address, 7)
    keep(address, 8, ranks=2)
    keep(address, 8, ranks=2, rank=1)
    with_the_first = kept(address)
    keep(address, 9, ranks=2)

    assert with_the_first == [(0, 8), (0, 7), (1, 8)]
    assert kept(address) == [(0, 9), (0, 8), (1, 8)]


def test_of_what_all_parts_are_held_none_goes_before_the_next_is_there_in_all(
    address: str,
) -> None:
    """One rank's saves fail, and the others go on."""
    for step in (6, 7):
        keep(address, step, ranks=2)
    for step in (8, 9):
        keep(address, step, ranks=2, kept=(1, 7))

    assert kept(address) == [(0, 9), (0, 7)]


def test_what_is_older_than_that_goes_also_of_who_saves_elsewhere_by_now(address: str) -> None:
    for step in (6, 7):
        keep(address, step, ranks=2, rank=1)
    keep(address, 7, ranks=2)
    keep(address, 8, ranks=2, kept=(1, 7))
    with_the_last = kept(address)
    keep(address, 9, ranks=2, kept=(1, 8))

    assert with_the_last == [(1, 7), (0, 8), (0, 7)]
    assert kept(address) == [(0, 9), (0, 8)]


def test_what_is_whole_in_one_part_replaces_all_parts_of_before(address: str) -> None:
    for rank in (0, 1):
        keep(address, 7, ranks=2, rank=rank)
    keep(address, 8)

    assert kept(address) == [(0, 8)]


def test_of_states_that_have_one_name_in_two_runs_each_is_read_as_itself(address: str) -> None:
    other = staged_at(7)
    memoryview(other.buffer)[0] ^= 1
    keep(address, 7, ranks=2)
    hold(Keeping(address, TOKEN), other, ranks=2, run="other")

    digests = [staged_at(7).digest, other.digest]
    assert [peer.read(address, TOKEN, 0, "save7", one).digest for one in digests] == digests


def test_frozen_weights_of_another_run_are_not_taken_for_ours(address: str) -> None:
    keep(address, 5, ranks=2)
    connection = Requests(address, TOKEN).ask(op="hold", **vars(label(6, ranks=2, run="other")))

    assert receive_json(connection) == {"newest": ""}


def test_while_a_run_saves_here_another_does_not_take_its_place(address: str) -> None:
    """A rank that joins where the shared folder is not mounted believes to be of another."""
    ours = Keeping(address, TOKEN)
    hold(ours, staged_at(5))
    with pytest.raises(PeerFailed, match="others save run r of this job here, and this is run odd"):
        keep(address, 6, run="odd")
    beside = kept(address)
    hold(ours, staged_at(6))
    ours.close()
    keep(address, 7, run="odd")

    assert beside == [(0, 5)]
    assert kept(address) == [(0, 7)]


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ({"op": "hold", "step": 1}, "missing 6 required"),
        ({"op": "read", "rank": 0}, "save"),
        ({"op": "forget"}, "unknown op 'forget'"),
    ],
)
def test_who_asks_rubbish_is_answered(address: str, asked: dict[str, Any], answer: str) -> None:
    with pytest.raises(PeerFailed, match=answer):
        receive_json(Requests(address, TOKEN).ask(**asked))


def test_a_stranger_reads_and_replaces_nothing(address: str) -> None:
    keep(address, 7)

    for ask in (lambda: peer.read(address, "guessed", 0, "save7", staged_at(7).digest),
                lambda: keep(address, 8, token="guessed")):  # fmt: skip
        with pytest.raises(PeerFailed, match="wrong token"):
            ask()
    assert kept(address) == [(0, 7)]


def test_who_cannot_be_served_hears_why(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 1)
    first = Requests(address, TOKEN)
    receive_json(first.ask(op="list"))

    with pytest.raises(PeerFailed, match="1 are connected to it already, and no more may be"):
        keep(address, 7)
    first.close()


# --- the process ----------------------------------------------------------------------------------


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

    with pytest.raises(Damaged, match=r"rank 0, tensors \.base.*were changed"):
        read(address, 7)


def test_memory_that_went_wrong_is_not_handed_on(folder: Path) -> None:
    address = peer.ensured(folder, "j", TOKEN, "127.0.0.1")
    keeping = Keeping(address, TOKEN)
    hold(keeping, staged_at(5))
    flip_held_bits(pid_of(folder / "j" / "holder.json"))

    with pytest.raises(PeerFailed, match=r"held of tensors \.base.*is not what was received"):
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
    own = peer.OwnHolder(folder, "j", TOKEN, "127.0.0.1")
    first = pid_of(folder / "j" / "holder.json")
    os.kill(first, signal.SIGKILL)

    def another() -> bool:
        found = folder / "j" / "holder.json"
        return found.exists() and pid_of(found) != first

    until(another, "another holder")
    keep(own.address, 7)
    assert read(own.address, 7).digest == staged_at(7).digest
    own.close()


def test_where_another_has_its_port_by_then_the_one_that_follows_is_elsewhere(folder: Path) -> None:
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
    first = peer.ensured(folder, "j", TOKEN, "127.0.0.1")
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


# --- whose memory it is ---------------------------------------------------------------------------


def members(*domains: str) -> list[dict[str, Any]]:
    return [
        {"replica": n, "holders": [Place(f"h{n}:1", domain).describe()] if domain else [{}]}
        for n, domain in enumerate(domains)
    ]


@pytest.mark.parametrize(
    ("domains", "keepers"),
    [
        (("a/1", "a/2", "a/3"), [1, 2, 0]),  # all equally far: the next one
        (("a/1", "a/2", "b/3", "b/4"), [2, 2, 0, 0]),  # another rack before another node
        (("a/1", "a/1", "a/2"), [2, 2, 0]),  # never the same node if there is another
        (("a/1", "a/1"), [1, 0]),  # there is none
        (("a/1",), [0]),
        (("a/1", "", "a/3"), [2, 2, 0]),  # one has no holder
    ],
)
def test_the_farthest_member_keeps_it(domains: tuple[str, ...], keepers: list[int]) -> None:
    there = members(*domains)

    found = [holder_for(there, n, 0, domain) for n, domain in enumerate(domains)]
    assert [one and one.address for one in found if one] == [f"h{n}:1" for n in keepers]


def test_of_a_job_in_two_halls_no_holder_is_for_more_than_a_few() -> None:
    domains = [f"hall-{n // 256}/rack-{n // 32}/{n}" for n in range(512)]
    there = members(*domains)

    found = [holder_for(there, n, 0, domain) for n, domain in enumerate(domains)]
    apart = [one.domain[:6] != mine[:6] for one, mine in zip(found, domains, strict=True) if one]

    assert apart == [True] * 512
    assert set(Counter(found).values()) == {peer.SHARED_BY}


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("cdef")), min_size=2, max_size=12))
def test_of_parts_no_node_keeps_more_than_one_and_another_group_does_where_it_can(
    racks: list[tuple[str, str]],
) -> None:
    nodes = [Place(f"h{n}:1", f"{hall}/{rack}/{n}") for n, (hall, rack) in enumerate(racks)]
    groups = [hall if len({hall for hall, _ in racks}) > 1 else rack for hall, rack in racks]
    group_of = dict(zip(nodes, groups, strict=True))
    largest = max(map(groups.count, groups))

    keepers = {node: in_turn(nodes, node) for node in nodes}
    together = [one for one in nodes if group_of[keepers[one][0]] == group_of[one]]

    assert {keeper for keeper, *_ in keepers.values()} == {*nodes}
    assert all({node, *found} == {*nodes} for node, found in keepers.items())
    assert all(node not in found for node, found in keepers.items())
    assert not together or largest > len(nodes) / 2


def test_of_several_that_could_keep_it_the_next_one_does_if_the_first_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer, "LOST_S", 0.0)
    keepers = Keepers(0, "a/0")
    keepers.follow([Place("h1:1", "a/1"), Place("h2:1", "a/2")])
    there = []
    for gone in ("h1:1", "h2:1"):
        there += [keepers.failed(gone), keepers.failed(gone), address_of(keepers)]

    assert there == [False, True, "h2:1", False, True, "h1:1"]  # which may be back


def test_where_nobody_has_a_holder_nobody_keeps_it() -> None:
    assert holder_for(members("", ""), 0, 0, "a/1") is None


def keepers_of(*domains: str) -> Keepers:
    """Of the first of these members."""
    keepers = Keepers(0, domains[0])
    keepers.meet(members(*domains), 0)
    return keepers


def address_of(keepers: Keepers) -> str:
    assert keepers.keeper is not None
    return keepers.keeper.address


def test_a_holder_to_which_saves_fail_for_long_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer, "LOST_S", 0.0)
    keepers = keepers_of("a/1", "a/2", "a/3")

    assert [keepers.failed("h1:1"), keepers.failed("h1:1")] == [False, True]
    assert address_of(keepers) == "h2:1"


def test_a_holder_that_is_back_soon_keeps_on(monkeypatch: pytest.MonkeyPatch) -> None:
    keepers = keepers_of("a/1", "a/2", "a/3")
    at_once = [keepers.failed("h1:1"), keepers.failed("h1:1")]
    monkeypatch.setattr(peer, "LOST_S", 0.0)
    keepers.kept()

    assert [*at_once, keepers.failed("h1:1")] == [False] * 3
    assert address_of(keepers) == "h1:1"


def test_who_was_passed_over_is_asked_again_where_nobody_else_keeps_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer, "LOST_S", 0.0)
    keepers = keepers_of("a/1", "a/2")
    asked = []
    for _ in range(3):
        asked.append(address_of(keepers))
        keepers.failed(asked[-1])
        keepers.failed(asked[-1])

    assert asked == ["h1:1", "h0:1", "h1:1"]


def test_who_was_passed_over_is_asked_again_once_the_members_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer, "LOST_S", 0.0)
    keepers = keepers_of("a/1", "a/2", "a/3")
    keepers.failed("h1:1")
    keepers.failed("h1:1")
    keepers.meet(members("a/1", "a/2"), 0)

    assert address_of(keepers) == "h1:1"


def test_a_label_is_newer_by_its_epoch_first() -> None:
    assert replace(label(3), epoch=2).age > label(7).age


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
