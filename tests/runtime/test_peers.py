"""State from peers' memory arrives whole, from several at once, for who knows the token; or not."""

from __future__ import annotations

import contextlib
import errno
import json
import queue
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import pytest
import torch

from runtime import serving
from runtime.framing import HEADER, PeerFailed, receive_chunk, send_json
from runtime.image import CHUNK_BYTES, Damaged, Staged
from runtime.replica import fetching, peers
from runtime.replica.buffers import BufferPool
from runtime.replica.fetching import (
    Connection,
    Download,
    Follower,
    NotKept,
    NotYet,
    fetch_reduced,
    fetch_state,
)
from runtime.replica.pacing import Pace
from runtime.replica.peers import PeerServer, Reduced, ReducedLog
from runtime.snapshot import SLICE_BYTES, Changed, Copying, allocate, stage
from tests.runtime import fake_card
from tests.runtime.replicas import until
from tests.runtime.test_background import refuses

MEGABYTES = 20
STATE: dict[str, Any] = {"weight": torch.arange(MEGABYTES << 18, dtype=torch.float32), "count": 3}
SIZE = stage(STATE, 7).table.bytes
PATIENCE_S = 30.0


class Donor:
    """A peer that holds a copy of the state after step 7."""

    def __init__(self, pace: Pace | None = None) -> None:
        self.kept = ReducedLog()
        self.staged: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self.server = PeerServer(
            "127.0.0.1",
            "right",
            self.kept,
            lambda step, digest: self.staged.put((step, digest)),
            pace,
        )
        self.address = self.server.address

    def offer(self, state: dict[str, Any]) -> str:
        self.server.offer(Copying(state, 7))
        step, digest = self.staged.get(timeout=PATIENCE_S)
        assert step == 7
        return digest


class Gate:
    """Passes a donor's connections on; each may carry only so many bytes to the newcomer."""

    def __init__(self, address: str, limits: list[int]) -> None:
        host, _, port = address.rpartition(":")
        self.target = (host, int(port))
        self.limits = limits
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.server.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        for limit in self.limits:
            near, _ = self.server.accept()
            with near, socket.create_connection(self.target) as far:
                threading.Thread(target=self._forward, args=(near, far), daemon=True).start()
                left = limit
                while left and (data := far.recv(min(left, 1 << 16))):
                    near.sendall(data)
                    left -= len(data)
                for end in (near, far):
                    with contextlib.suppress(OSError):  # it was closed before
                        end.shutdown(socket.SHUT_RDWR)
        self.server.close()

    @staticmethod
    def _forward(near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the other thread shut them down
            while data := near.recv(1 << 16):
                far.sendall(data)
            far.shutdown(socket.SHUT_RDWR)


class Held:
    """Passes connections on to a donor, one after another, and holds up whatever is longer than so
    many bytes behind these until it is let."""

    def __init__(self, address: str, after: int) -> None:
        host, _, port = address.rpartition(":")
        self.target = (host, int(port))
        self.after = after
        self.held = threading.Event()
        self.let = threading.Event()
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.server.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            near, _ = self.server.accept()
            with contextlib.suppress(OSError), near, socket.create_connection(self.target) as far:
                threading.Thread(target=Gate._forward, args=(near, far), daemon=True).start()
                self._pass_back(near, far)

    def _pass_back(self, near: socket.socket, far: socket.socket) -> None:
        passed = 0
        while data := far.recv(1 << 16):
            near.sendall(data)
            passed += len(data)
            if passed >= self.after:
                self.held.set()
                self.let.wait(PATIENCE_S)


@pytest.fixture
def make_donor() -> Iterator[Callable[..., Donor]]:
    donors: list[Donor] = []

    def make(pace: Pace | None = None) -> Donor:
        donors.append(Donor(pace))
        return donors[-1]

    yield make
    for donor in donors:
        donor.server.close()


@pytest.fixture
def donor(make_donor: Callable[[], Donor]) -> Donor:
    return make_donor()


def manifest_of(donor: Donor) -> dict[str, Any]:
    return Connection(donor.address, "right").manifest(7)


def test_a_state_arrives_bit_for_bit(donor: Donor) -> None:
    digest = donor.offer(STATE)

    staged = fetch_state([donor.address], "right", 7, digest)

    assert (staged.step, staged.digest) == (7, stage(STATE, 7).digest)


def test_several_peers_each_give_a_part(
    make_donor: Callable[[], Donor], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "drydock.peers")
    donors = [make_donor() for _ in range(3)]
    (digest,) = {donor.offer(STATE) for donor in donors}
    gates = [Held(donor.address, CHUNK_BYTES + HEADER.size) for donor in donors]

    with ThreadPoolExecutor(1) as newcomer:
        fetched = newcomer.submit(fetch_state, [gate.address for gate in gates], "right", 7, digest)
        gave_a_chunk = [gate.held.wait(PATIENCE_S) for gate in gates]  # and no more for now
        for gate in gates:
            gate.let.set()

    assert gave_a_chunk == [True] * 3
    assert fetched.result().digest == digest
    ours = [one for one in caplog.messages if any(gate.address in one for gate in gates)]
    (told,) = ours  # no connection failed, so all of them gave at the same time
    assert told.startswith("state_fetched step=7 ")
    gave = json.loads(told.partition("chunks=")[2])
    assert set(gave) == {gate.address for gate in gates}
    assert sum(gave.values()) == MEGABYTES


def test_what_arrived_before_a_connection_broke_is_not_fetched_again(donor: Donor) -> None:
    digest = donor.offer(STATE)
    gate = Gate(donor.address, [5 * CHUNK_BYTES + 1000, 4 * CHUNK_BYTES, 99 * CHUNK_BYTES])
    download = Download(manifest_of(donor), allocate(SIZE))

    download.draw(gate.address, "right")

    assert download.whole().digest == digest
    assert download.sources[gate.address] == MEGABYTES


def test_a_peer_that_dies_on_the_way_is_replaced_by_the_others(
    make_donor: Callable[[], Donor],
) -> None:
    good, dying = make_donor(), make_donor()
    digest = good.offer(STATE)
    dying.offer(STATE)
    gate = Gate(dying.address, [CHUNK_BYTES, 2 * CHUNK_BYTES + 1, 1, 1])

    staged = fetch_state([gate.address, good.address], "right", 7, digest)

    assert staged.digest == digest


def test_a_peer_with_another_state_gives_nothing(make_donor: Callable[[], Donor]) -> None:
    right, wrong = make_donor(), make_donor()
    digest = right.offer(STATE)
    wrong.offer({**STATE, "weight": STATE["weight"] + 1})

    staged = fetch_state([wrong.address, right.address], "right", 7, digest)

    assert staged.digest == digest
    with pytest.raises(PeerFailed, match="its copy of step 7 is"):
        fetch_state([wrong.address], "right", 7, digest)


def test_what_newcomers_take_is_held_up_and_reduced_gradients_are_not(
    make_donor: Callable[..., Donor],
) -> None:
    waits: list[float] = []
    pace = Pace(CHUNK_BYTES, burst=CHUNK_BYTES, now=lambda: 0.0, wait=waits.append)
    donor = make_donor(pace)
    digest = donor.offer(STATE)
    donor.kept.add(Reduced(8, 1, torch.zeros(2 * CHUNK_BYTES)))

    staged = fetch_state([donor.address], "right", 7, digest)
    fetch_reduced([donor.address], "right", 8)

    assert staged.digest == digest
    assert waits == [float(second) for second in range(1, MEGABYTES)]


def test_a_state_that_nobody_holds_any_more_is_named(donor: Donor) -> None:
    digest = donor.offer(STATE)
    donor.server.release(log=False)

    with pytest.raises(PeerFailed, match="no copy of step 7 is held here"):
        fetch_state([donor.address], "right", 7, digest)


@pytest.mark.parametrize(
    "request_",
    [
        {"op": "manifest", "step": 7},
        {"op": "chunks", "step": 7, "first": 0, "count": 1},
        {"op": "reduced", "step": 7, "wait_s": 0.0, "settled": False},
    ],
)
def test_a_wrong_token_gets_nothing_and_no_second_try(
    donor: Donor, request_: dict[str, Any]
) -> None:
    donor.offer(STATE)
    connection = Connection(donor.address, "guessed").ask(**request_)
    connection.settimeout(PATIENCE_S)

    answer = connection.makefile("rb").read()

    assert answer[4:] == b'{"error": "wrong token"}'


def test_reduced_gradients_are_handed_over_while_they_are_kept(donor: Donor) -> None:
    for step in range(4):
        donor.kept.add(Reduced(step, 9, torch.full((5,), float(step))))
    connection = Connection(donor.address, "right")

    newest = connection.reduced(3)

    assert newest.epoch == 9
    assert torch.equal(newest.buffer, torch.full((5,), 3.0))
    with pytest.raises(NotKept):
        connection.reduced(1)
    with pytest.raises(NotYet):
        connection.reduced(4)
    with pytest.raises(PeerFailed, match="made 3 last"):
        fetch_reduced([donor.address], "right", 4)


def test_a_step_comes_from_a_card_slice_by_slice(
    donor: Donor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for it has the first before the last is there; and torch keeps for good what it has
    pinned at once."""
    taken = fake_card.takes(monkeypatch)
    buffer = torch.arange(SLICE_BYTES // 2, dtype=torch.float32)  # two of them
    donor.kept.add(Reduced(8, 1, buffer[:-3].as_subclass(fake_card.OnCard)))

    found = fetch_reduced([donor.address], "right", 8)

    assert torch.equal(found.buffer, buffer[:-3])
    assert max(taken) == SLICE_BYTES


def test_a_step_that_nobody_went_beyond_is_not_for_followers(donor: Donor) -> None:
    for step in (3, 4):
        donor.kept.add(Reduced(step, 1, torch.zeros(5)))
    connection = Connection(donor.address, "right")

    assert connection.reduced(3, settled=True).step == 3
    with pytest.raises(NotYet):
        connection.reduced(4, settled=True)


def test_steps_that_led_to_another_state_are_not_handed_on(donor: Donor) -> None:
    for step in (3, 4):
        donor.kept.add(Reduced(step, 1, torch.zeros(5)))

    donor.kept.clear()

    with pytest.raises(NotYet):
        Connection(donor.address, "right").reduced(4)


def test_a_stranger_who_says_nothing_is_hung_up_on(
    donor: Donor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "FIRST_LINE_S", 0.05)
    host, _, port = donor.address.rpartition(":")

    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        assert connection.recv(1) == b""


def test_strangers_take_no_place_of_a_peer(donor: Donor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "FIRST_LINE_S", 60.0)
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(serving, "MAX_STRANGERS", 2)
    donor.kept.add(Reduced(8, 1, torch.zeros(5)))
    host, _, port = donor.address.rpartition(":")
    peer = Connection(donor.address, "right")
    with contextlib.ExitStack() as stack:

        def strangers_come() -> socket.socket:
            coming = [
                stack.enter_context(socket.create_connection((host, int(port)), PATIENCE_S))
                for _ in range(3)
            ]
            return coming[0]

        assert strangers_come().recv(1) == b""
        assert peer.reduced(8).step == 8
        assert strangers_come().recv(1) == b""
        assert peer.reduced(8).step == 8  # it was there before them, and still is
    peer.close()


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What servers said to those whom they could not serve."""
    told: list[str] = []

    def noted(connection: socket.socket, message: dict[str, Any]) -> None:
        told.append(message["error"])
        send_json(connection, message)

    monkeypatch.setattr(serving, "send_json", noted)
    return told


def test_who_serves_too_many_is_asked_again(
    donor: Donor, refused: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large job most may be behind the one that made the last step."""
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(fetching, "ASK_AGAIN_S", 0.01)
    donor.kept.add(Reduced(8, 1, torch.zeros(5)))
    first = Connection(donor.address, "right")
    assert first.reduced(8).step == 8

    with ThreadPoolExecutor() as pool:
        asking = pool.submit(fetch_reduced, [donor.address], "right", 8)
        until(lambda: len(refused) > 1, "it was refused, and asked again")
        first.close()
        assert asking.result(PATIENCE_S).step == 8


def test_once_the_step_is_not_wanted_who_serves_too_many_is_asked_no_longer(
    donor: Donor, refused: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 0)

    with pytest.raises(PeerFailed, match="no peer could hand over step 8"):
        fetch_reduced([donor.address], "right", 8, broken=lambda: len(refused) > 1)


class Gated(Copying):
    """A copy that is finished once it is let."""

    def __init__(self, state: dict[str, Any], step: int) -> None:
        super().__init__(state, step)
        self.gate = threading.Event()

    def finish(self, *given: Any, **how: Any) -> Staged:
        assert self.gate.wait(PATIENCE_S)
        return super().finish(*given, **how)


def test_a_copy_that_was_released_while_it_was_copied_is_not_held(donor: Donor) -> None:
    copying, gone = Gated(STATE, 7), threading.Event()
    donor.server.offer(copying, gone.set)
    donor.server.release(log=False)
    assert not gone.is_set()  # it is still copied to

    copying.gate.set()

    assert gone.wait(PATIENCE_S)
    assert copying.finished.is_set()  # the training waits for that
    assert donor.staged.empty()
    with pytest.raises(PeerFailed, match="no copy of step 7"):
        manifest_of(donor)


class Torn(Copying):
    """A copy that turns out not to be one."""

    def finish(self, *given: Any, **how: Any) -> Staged:
        super().finish(*given, **how)
        raise Changed("it was changed meanwhile")


def test_a_copy_that_fails_is_told_of_and_not_held(donor: Donor) -> None:
    gone = threading.Event()

    donor.server.offer(Torn(STATE, 7), gone.set)

    assert donor.staged.get(timeout=PATIENCE_S) == (7, "")
    with pytest.raises(PeerFailed, match="no copy of step 7"):
        manifest_of(donor)
    donor.server.release(log=False)
    assert gone.wait(PATIENCE_S)


def test_the_memory_of_a_copy_is_another_s_only_once_nobody_is_sent_of_it(donor: Donor) -> None:
    gone = threading.Event()
    donor.server.offer(Copying(STATE, 7), gone.set)
    donor.staged.get(timeout=PATIENCE_S)
    connection = Connection(donor.address, "right")
    source = connection.ask(op="chunks", step=7, first=0, count=MEGABYTES)
    chunk = memoryview(bytearray(CHUNK_BYTES))
    receive_chunk(source, chunk)  # the others wait in its socket, and in the donor's hands

    donor.server.release(log=False)
    with pytest.raises(PeerFailed, match="no copy of step 7"):
        manifest_of(donor)
    assert not gone.is_set()

    for _ in range(MEGABYTES - 1):
        receive_chunk(source, chunk)
    assert gone.wait(PATIENCE_S)
    connection.close()


def test_where_no_thread_can_be_had_a_copy_is_held_all_the_same(
    donor: Donor, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[str] = []
    with monkeypatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", refuses)
        donor.server.offer(Copying(STATE, 6), lambda: given_back.append("first"))
        donor.staged.get(timeout=PATIENCE_S)
        digest = donor.offer(STATE)

    assert given_back == ["first"]
    assert fetch_state([donor.address], "right", 7, digest).digest == digest


def test_the_next_copy_takes_the_place_of_the_one_before(donor: Donor) -> None:
    gone = threading.Event()
    donor.server.offer(Copying(STATE, 7), gone.set)
    donor.staged.get(timeout=PATIENCE_S)

    donor.offer(STATE)

    assert gone.wait(PATIENCE_S)


def test_once_a_copy_was_offered_more_steps_are_kept(donor: Donor) -> None:
    donor.offer(STATE)
    for step in range(8, 40):
        donor.kept.add(Reduced(step, 1, torch.zeros(5)))

    assert fetch_reduced([donor.address], "right", 8).step == 8


def test_what_was_kept_for_newcomers_is_given_back_by_and_by() -> None:
    """The step in which they enter waits for none of it."""
    kept, left = ReducedLog(), []
    kept.copied = 1
    for step in range(14):
        kept.add(Reduced(step, 1, torch.zeros(4)))
        left.append(len(kept._kept))
        kept.copied = int(step < 7)

    assert left == [1, 2, 3, 4, 5, 6, 7, 8, 7, 6, 5, 4, 3, 2]


@pytest.mark.parametrize(
    ("fit", "kept"),
    [(20, 8), (7, 5), (4, 2), (3, 2)],
)
def test_a_card_keeps_no_more_steps_than_it_has_room_for(
    fit: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training that finds its card full ends, and with it whoever was to follow."""
    log = ReducedLog()
    log.copied = 1
    size = peers.LOG_BYTES // 4
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: ((fit - len(log._kept)) * size, 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _card: 30 * size)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _card: 30 * size)

    for step in range(10):
        log.add(Reduced(step, 1, torch.empty(size // 4).as_subclass(fake_card.OnCard)))

    assert len(log._kept) == kept


def test_in_a_healthy_step_no_card_is_asked_for_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "room_on", pytest.fail)
    log = ReducedLog()

    for step in range(3):  # none of which anybody follows
        buffer = torch.empty(peers.LOG_BYTES // 4).as_subclass(fake_card.OnCard)
        log.add(Reduced(step, 1, buffer))

    assert len(log._kept) == 2


def test_a_card_of_which_nothing_is_counted_keeps_as_many_as_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def uncounted(_card: torch.device) -> NoReturn:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _card: (0, 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", uncounted)

    assert peers.room_on(fake_card.DEVICE) > 1 << 50


def test_who_takes_a_large_copy_finds_the_steps_since_however_small_they_are(
    donor: Donor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "LOG_BYTES", 0)
    donor.offer(STATE)
    for step in range(8, 48):
        donor.kept.add(Reduced(step, 1, torch.zeros(SIZE // 4 // 40)))

    assert fetch_reduced([donor.address], "right", 8).step == 8


def test_a_follower_that_one_donor_cannot_serve_any_more_is_served_by_another(
    make_donor: Callable[[], Donor],
) -> None:
    """Those of whom copies were taken keep more steps than the others."""
    donors = [make_donor(), make_donor()]
    heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    donors[1].kept.copied = 1
    for step in range(8, 16):
        for donor in donors:
            donor.kept.add(Reduced(step, 1, torch.zeros(5)))
    follower = Follower([d.address for d in donors], "right", 8, heard.put)

    made = [heard.get(timeout=PATIENCE_S) for _ in range(2)]
    follower.stop()

    assert [(one["op"], one["reduced"].step) for one in made] == [("made", 8), ("made", 9)]


def test_a_step_that_was_fetched_before_does_not_come_again(donor: Donor) -> None:
    donor.kept.add(Reduced(8, 2, torch.ones(5)))
    connection = Connection(donor.address, "right")
    same, another = Reduced(8, 2, torch.ones(5)), Reduced(8, 1, torch.zeros(5))

    assert connection.reduced(8, have=same) is same
    assert fetch_reduced([donor.address], "right", 8, same) is same
    assert torch.equal(connection.reduced(8, have=another).buffer, torch.ones(5))


def test_a_buffer_that_a_step_came_in_is_used_again_once_nobody_holds_the_step(
    donor: Donor,
) -> None:
    donor.kept.add(Reduced(8, 1, torch.ones(5)))
    connection, pool = Connection(donor.address, "right"), BufferPool(torch.device("cpu"))

    held = connection.reduced(8, pool=pool)
    buffer = held.buffer

    assert pool.take(5) is not buffer
    del held
    assert pool.take(5) is buffer


def test_the_bytes_of_a_step_come_before_others_go_on_from_it(donor: Donor) -> None:
    follower, _heard = level_with(donor)

    follower.stop()

    held = follower.drawn(8)
    assert held is not None
    assert fetch_reduced([donor.address], "right", 8, held) is held


def test_a_step_that_was_passed_on_and_not_applied_is_still_there(donor: Donor) -> None:
    heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for step in (8, 9):
        donor.kept.add(Reduced(step, 1, torch.zeros(5)))
    follower = Follower([donor.address], "right", 8, heard.put)
    passed_on = heard.get(timeout=PATIENCE_S)["reduced"]

    follower.stop()

    assert follower.drawn(8) is passed_on
    follower.applied(7)  # of a former follower
    assert follower.drawn(8) is passed_on
    follower.applied(8)
    assert follower.drawn(8) is None


def test_a_step_that_was_made_anew_replaces_the_one_that_came_before(donor: Donor) -> None:
    follower, heard = level_with(donor)

    donor.kept.clear()  # who made it with that one has died
    donor.kept.add(Reduced(8, 2, torch.ones(5)))
    donor.kept.add(Reduced(9, 2, torch.ones(5)))
    made = until_made(heard)
    follower.stop()

    assert (made.step, made.epoch) == (8, 2)
    assert torch.equal(made.buffer, torch.ones(5))


def test_a_step_that_just_comes_from_one_who_lives_is_waited_for(
    donor: Donor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "REST_S", PATIENCE_S)
    donor.kept.add(Reduced(8, 1, torch.zeros(CHUNK_BYTES)))  # four chunks
    gate = Held(donor.address, CHUNK_BYTES)
    follower = Follower([gate.address], "right", 8, lambda _message: None)
    until(lambda: follower._asked and follower._asked.receiving, "its bytes come")

    follower.stop()

    assert follower.drawn(8, ["127.0.0.1:1"]) is None  # that one may have died
    threading.Timer(0.1, gate.let.set).start()
    held = follower.drawn(8, [gate.address])
    assert held is not None
    assert held.step == 8


@pytest.mark.parametrize("broken", [False, True])
def test_a_step_of_which_nothing_more_comes_is_not_waited_for(
    donor: Donor, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    monkeypatch.setattr(fetching, "REST_S", 60.0 * broken + 0.05)
    donor.kept.add(Reduced(8, 1, torch.zeros(CHUNK_BYTES)))
    gate = Held(donor.address, CHUNK_BYTES)
    follower = Follower([gate.address], "right", 8, lambda _message: None)
    until(lambda: follower._asked and follower._asked.receiving, "its bytes come")

    follower.stop()

    assert follower.drawn(8, [gate.address], lambda: broken) is None
    gate.let.set()


def test_a_step_for_an_epoch_that_broke_is_waited_for_from_no_donor(donor: Donor) -> None:
    donor.kept.add(Reduced(8, 1, torch.zeros(CHUNK_BYTES)))
    broke = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "{}:{}".format(*silent.getsockname())
        threading.Timer(0.2, broke.set).start()

        with pytest.raises(PeerFailed, match="no peer could hand over step 8"):
            fetch_reduced([address, donor.address], "right", 8, broken=broke.is_set)


def test_a_step_whose_bytes_are_here_does_not_come_again_with_another_follower(
    donor: Donor,
) -> None:
    heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    ahead = Reduced(8, 1, torch.ones(5))
    for step in (8, 9):
        donor.kept.add(Reduced(step, 1, torch.zeros(5)))

    follower = Follower([donor.address], "right", 8, heard.put, ahead=ahead)

    assert until_made(heard) is ahead
    follower.stop()


def test_a_donor_that_keeps_a_step_no_longer_still_knows_whether_it_is_the_one(
    donor: Donor,
) -> None:
    for step in range(8, 13):
        donor.kept.add(Reduced(step, 2, torch.zeros(5)))
    connection = Connection(donor.address, "right")
    same, another = Reduced(8, 2, torch.zeros(5)), Reduced(8, 1, torch.zeros(5))

    assert connection.reduced(8, settled=True, have=same) is same
    with pytest.raises(NotKept):
        connection.reduced(8, settled=True, have=another)


def test_on_a_connection_that_rested_a_peer_may_have_hung_up(
    donor: Donor, monkeypatch: pytest.MonkeyPatch
) -> None:
    donor.kept.add(Reduced(8, 1, torch.zeros(5)))
    connection = Connection(donor.address, "right")
    connection.reduced(8)
    assert connection._socket is not None
    connection._socket.shutdown(socket.SHUT_RDWR)

    monkeypatch.setattr(fetching, "IDLE_S", 0.0)

    assert connection.reduced(8).step == 8


def level_with(donor: Donor) -> tuple[Follower, queue.SimpleQueue[dict[str, Any]]]:
    """A follower of a donor that made step 8 and nothing on it, and what it hears from then on."""
    heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    donor.kept.add(Reduced(8, 1, torch.zeros(5)))
    follower = Follower([donor.address], "right", 8, heard.put)
    assert heard.get(timeout=PATIENCE_S)["op"] == "up_to_date"
    return follower, heard


def until_made(heard: queue.SimpleQueue[dict[str, Any]]) -> Reduced:
    while (message := heard.get(timeout=PATIENCE_S))["op"] != "made":
        pass
    made: Reduced = message["reduced"]
    return made


def test_a_follower_without_memory_says_that_it_cannot_follow(
    donor: Donor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(_size: int) -> torch.Tensor:
        raise RuntimeError("not enough memory: you tried to allocate 20 bytes")

    donor.kept.add(Reduced(8, 1, torch.zeros(5)))
    donor.kept.add(Reduced(9, 1, torch.zeros(5)))
    monkeypatch.setattr("runtime.replica.fetching.torch.empty", none_left)
    heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    Follower([donor.address], "right", 8, heard.put)

    message = heard.get(timeout=PATIENCE_S)
    assert message["op"] == "cannot_follow"
    assert "not enough memory" in message["error"]


def test_a_state_for_which_there_is_no_memory_says_how_much_it_takes(
    donor: Donor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(_size: int, *, large: bool) -> memoryview:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    digest = donor.offer(STATE)
    size = manifest_of(donor)["bytes"]
    monkeypatch.setattr("runtime.replica.fetching.pages", none_left)

    with pytest.raises(MemoryError, match=f"{size} bytes for the state of step 7 cannot be had"):
        fetch_state([donor.address], "right", 7, digest)


def test_a_step_for_which_there_is_no_memory_says_how_much_it_takes(
    donor: Donor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(_size: int) -> torch.Tensor:
        raise RuntimeError("can't allocate memory")

    donor.kept.add(Reduced(8, 1, torch.zeros(5)))
    monkeypatch.setattr("runtime.replica.fetching.torch.empty", none_left)

    with pytest.raises(MemoryError, match="20 bytes for step 8 cannot be had"):
        fetch_reduced([donor.address], "right", 8)


def test_a_follower_hears_of_each_step_in_order_and_when_it_is_up_to_date(
    make_donor: Callable[[], Donor],
) -> None:
    donors = [make_donor(), make_donor()]
    heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for donor in donors:
        donor.kept.copied = 1
        for step in (8, 9):
            donor.kept.add(Reduced(step, 1, torch.zeros(5)))
    follower = Follower([d.address for d in donors], "right", 8, heard.put)

    def hear(op: str) -> dict[str, Any]:
        while (message := heard.get(timeout=PATIENCE_S))["op"] != op:
            pass
        return message

    first = hear("made")["reduced"].step
    level = hear("up_to_date")["step"]
    donors[1].kept.add(Reduced(10, 1, torch.zeros(5)))
    follower.applied(8)
    second = hear("made")["reduced"].step
    donors[1].kept.copied = 0
    for step in range(11, 20):
        donors[1].kept.add(Reduced(step, 1, torch.zeros(5)))
    follower.applied(9)
    follower.applied(10)
    error = hear("cannot_follow")["error"]

    assert (first, level, second) == (8, 8, 9)
    assert re.search(r"made 1\d last", error)  # it may have asked while they were being made


def test_a_chunk_changed_on_the_way_is_found() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(HEADER.pack(4, bytes(16)) + b"data")

        with pytest.raises(Damaged):
            receive_chunk(ours, memoryview(bytearray(4)))


def test_a_state_whose_digest_differs_is_refused() -> None:
    staged = stage(STATE, 7)
    described = staged.describe()

    staged.buffer[100] ^= 1

    with pytest.raises(Damaged, match="digest"):
        Staged.restore(described, staged.buffer)


def test_a_state_with_a_chunk_that_nobody_compared_is_refused() -> None:
    staged = stage(STATE, 7)

    with pytest.raises(Damaged, match="digest"):
        Staged.restore(staged.describe(), staged.buffer, staged.hashes[:-1])
