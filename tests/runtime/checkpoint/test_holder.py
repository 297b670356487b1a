"""What a holder keeps of peers' states: the newest that came whole, for who knows the token."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime import framing, serving
from runtime.checkpoint import holder, memory_left, peer
from runtime.checkpoint.holder import Buffer, Holder
from runtime.checkpoint.peer import Keeping
from runtime.framing import PeerFailed, receive_json, send_chunk, send_json
from runtime.image import CHUNK_BYTES, Damaged, Staged, chunks_of
from runtime.serving import Requests, RequestServer
from runtime.snapshot import Copying
from tests.runtime.checkpoint.holding import (
    PATIENCE_S,
    TOKEN,
    answering,
    hold,
    in_the_middle,
    keep,
    kept,
    label,
    read,
)
from tests.runtime.checkpoint.states import SOON_S, due, staged_at
from tests.runtime.replicas import until


@pytest.fixture
def here() -> Holder:
    """The one at `address`, whose memory can be looked into."""
    return Holder()


@pytest.fixture
def address(here: Holder) -> Iterator[str]:
    server = RequestServer("127.0.0.1", TOKEN, here.serve, idle_s=None)
    yield server.address
    server.close()


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


def test_who_waits_for_a_state_that_another_replica_sends_slowly_is_not_given_up(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[dict[str, Any]] = []
    monkeypatch.setattr(peer, "SILENT_S", 5.0)
    monkeypatch.setattr(holder, "SIGN_S", 0.5)

    def noted(connection: socket.socket) -> dict[str, Any]:
        heard.append(receive_json(connection))
        return heard[-1]

    monkeypatch.setattr(peer, "receive_json", noted)
    first = in_the_middle(address, 7)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(keep, address, 7)
        until(lambda: len(heard) > 12 or second.done(), "longer than it would hear nothing")
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


def test_that_many_tensors_are_damaged_hides_neither_whose_they_are_nor_why(
    address: str, here: Holder
) -> None:
    weights = {f"w{n}": torch.zeros(1) for n in range(1000)}
    older, newer = (Copying({"base": weights}, step, due=due).finish() for step in (7, 8))
    keeping = Keeping(address, TOKEN)
    hold(keeping, older, bytes=older.table.bytes)
    (held,) = here.memory.listed()
    held.buffer.memory[0] ^= 1

    with pytest.raises(Damaged, match=r"rank 0, tensors base\.w.* and 996 more: a chunk of"):
        peer.read(address, TOKEN, 0, "save7", older.digest)
    with pytest.raises(PeerFailed, match=r"rank 0, tensors base\.w.* and 996 more, is not what"):
        hold(keeping, newer, bytes=newer.table.bytes)


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
        ({"op": "read", "rank": "first", "save": "save7", "digest": ""}, "invalid literal"),
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
