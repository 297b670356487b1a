"""A collective whose epoch breaks ends, even where its sockets would let it wait for ever."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import socket
import termios
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pytest
import torch

from runtime.replica.gloo import DOUBT_S, SILENT_MS, Gloo, LinkStore, group_sockets, severed
from runtime.replica.link import LinkLost
from runtime.replica.membership import Severed, Silent
from tests.runtime.replicas import Board, until


@pytest.fixture
def pair(collectives: Callable[[int], list[Gloo]]) -> tuple[Gloo, Gloo]:
    first, second = collectives(2)
    return first, second


def in_thread(work: Callable[[], object]) -> Future[object]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


def test_a_sum_over_the_group(pair: tuple[Gloo, Gloo]) -> None:
    buffers = [torch.ones(5), torch.full((5,), 2.0)]

    jobs = [
        in_thread(partial(member.all_reduce, buffer))
        for member, buffer in zip(pair, buffers, strict=True)
    ]
    for job in jobs:
        job.result(30)

    assert [b.tolist() for b in buffers] == [[3.0] * 5] * 2


def test_a_broken_epoch_ends_a_collective_that_the_sockets_would_not_end(
    pair: tuple[Gloo, Gloo],
) -> None:
    ours, _theirs = pair
    ours._peers, ours.address = set(), ""  # sever finds no socket to shut
    begun = threading.Event()
    ours.begun = begun.set
    waiting = in_thread(lambda: ours.all_reduce(torch.ones(5)))
    until(begun.is_set, "it waits for a peer that never comes")

    ours.sever(1)

    with pytest.raises(Severed, match="did not end"):
        waiting.result(30)
    with pytest.raises(Severed, match="epoch 1 broke"):
        ours.all_reduce(torch.ones(5))


def test_what_a_collective_that_is_left_behind_uses_is_freed_once_it_ends(
    pair: tuple[Gloo, Gloo], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, _theirs = pair
    monkeypatch.setattr("runtime.replica.gloo.REDUCE_S", 5.0)
    ours._peers, ours.address = set(), ""  # sever finds no socket to shut
    begun = threading.Event()
    ours.begun = begun.set
    buffer = torch.ones(5)
    watched = weakref.ref(buffer)
    waiting = in_thread(partial(left_behind, ours, buffer))
    del buffer
    until(begun.is_set, "it waits for a peer that never comes")

    ours.sever(1)

    waiting.result(30)
    assert until(lambda: watched() is None, "it is freed")
    group = weakref.ref(ours._built[0])
    ours.build(Board(), 2, [ours.address], 0)
    assert until(lambda: group() is None, "its group is freed with it")


def test_a_collective_that_is_left_behind_does_not_keep_its_member(
    collectives: Callable[[int], list[Gloo]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo's own thread would be the last to know it, and to free its group: which waits for that
    thread, and ends the process."""
    monkeypatch.setattr("runtime.replica.gloo.REDUCE_S", 10.0)
    made = collectives(2)
    watched = weakref.ref(made[0])
    made[0]._peers, made[0].address = set(), ""  # sever finds no socket to shut
    begun = threading.Event()
    made[0].begun = begun.set
    waiting = in_thread(partial(left_behind, made[0], torch.ones(5)))
    until(begun.is_set, "it waits for a peer that never comes")
    made[0].sever(1)
    waiting.result(30)

    del made[0]

    def gone() -> bool:
        gc.collect()
        return watched() is None

    assert until(gone, "it goes before its collective ends")


def test_what_was_waited_for_is_not_asked_for_again() -> None:
    asked: list[str] = []

    class Link(Board):
        def get(self, epoch: int, key: str, timeout_s: float) -> str:
            asked.append(key)
            return super().get(epoch, key, timeout_s)

    store = LinkStore(Link(), 1, 0)
    store.set("a", b"1")
    store.wait(["a"])

    assert store.get("a") == b"1"
    assert len(asked) == 1
    assert store.get("a") == b"1"
    assert len(asked) == 2


def left_behind(member: Gloo, buffer: torch.Tensor) -> None:
    with pytest.raises(Severed, match="did not end"):
        member.all_reduce(buffer)


def test_the_kernel_is_told_to_end_connections_on_which_nothing_is_acknowledged(
    pair: tuple[Gloo, Gloo],
) -> None:
    ours, theirs = pair
    for member in (ours, theirs):
        member._connected()

    connections = [*group_sockets(ours.address, ours._peers).values()]
    limits = [c.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for c in connections]
    for connection in connections:
        connection.close()

    assert limits
    assert set(limits) == {SILENT_MS}


def test_a_connection_that_ends_within_a_message_ends_its_collective(
    pair: tuple[Gloo, Gloo],
) -> None:
    """Gloo tells those who wait of everything but a message of which a part has come or gone."""
    for member in pair:
        member._connected()
    ends = [group_sockets(member.address, member._peers) for member in pair]
    connections = [*ends[0].values(), *ends[1].values()]
    for connection in connections:  # so that it takes long
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    numbers = torch.ones(1 << 22)
    half = len(numbers) // 2
    begun = [threading.Event() for _ in pair]
    for member, event in zip(pair, begun, strict=True):
        member.begun = event.set
    waiting = [
        in_thread(partial(member.exchange, [numbers[:half], numbers[half:]], [half, half]))
        for member in pair
    ]
    until(lambda: all(event.is_set() for event in begun), "both exchange")
    until(lambda: any(map(has_bytes_under_way, connections)), "a message is under way")

    for connection in connections:
        with contextlib.suppress(OSError):  # the other end's was shut before
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()

    for job in waiting:
        with pytest.raises(Severed):
            job.result(30)


def has_bytes_under_way(connection: socket.socket) -> bool:
    """Whether some wait to be sent, or for the other end's acknowledgement."""
    waiting = fcntl.ioctl(connection, termios.TIOCOUTQ, b"\0" * 4)
    return waiting != b"\0" * 4


@pytest.mark.parametrize(
    ("why", "kind"),
    [
        (f"Read error [10.0.0.2]:4: {os.strerror(110)}. This is typically ...", Silent),
        (f"writev [10.0.0.2]:4: {os.strerror(113)}", Silent),
        ("Connect timeout [10.0.0.2]:4", Silent),
        ("Connection closed by peer [10.0.0.2]:4", Severed),
        (f"Read error [10.0.0.2]:4: {os.strerror(104)}", Severed),
    ],
)
def test_a_peer_that_answers_nothing_is_told_from_one_that_ended(
    why: str, kind: type[Severed]
) -> None:
    assert type(severed(why)) is kind


def test_a_group_is_built_beside_the_step_and_its_first_collective_waits_for_it() -> None:
    board, (ours, theirs) = Board(), [Gloo("127.0.0.1"), Gloo("127.0.0.1")]
    addresses = [ours.address, theirs.address]
    mine = torch.ones(3)

    ours.build(board, 1, addresses, 0)  # nobody else is there yet
    waiting = in_thread(lambda: ours.all_reduce(mine))
    theirs.build(board, 1, addresses, 1)
    theirs.all_reduce(torch.ones(3))
    waiting.result(30)

    assert mine.tolist() == [2.0] * 3


def test_an_epoch_that_breaks_while_its_group_is_built_ends_the_wait_for_it() -> None:
    ours = Gloo("127.0.0.1")
    ours.build(Board(), 4, [ours.address, "127.0.0.1:9"], 0)
    waiting = in_thread(lambda: ours.all_reduce(torch.ones(3)))

    ours.sever(4)

    with pytest.raises(Severed, match="epoch 4 broke"):
        waiting.result(30)


def test_a_group_that_does_not_stand_in_time_is_doubted_and_the_next_has_longer() -> None:
    ours = Gloo("127.0.0.1")
    ours.build(Board(), 1, [ours.address, "127.0.0.1:9"], 0)

    with pytest.raises(Silent, match="not all peers came"):
        ours.gather(torch.ones(3), 2)
    ours.build(Board(), 2, [ours.address, "127.0.0.1:9"], 0)

    assert ours._doubt_s == 2 * DOUBT_S


def test_after_a_group_that_stood_the_next_has_no_longer(pair: tuple[Gloo, Gloo]) -> None:
    ours, _theirs = pair
    ours._connected()

    ours.build(Board(), 2, [ours.address, "127.0.0.1:9"], 0)

    assert ours._doubt_s == DOUBT_S


def test_why_there_is_no_group_is_said_by_its_first_collective() -> None:
    class Lost(Board):
        def get(self, _epoch: int, key: str, _timeout_s: float) -> str:
            raise LinkLost(f"nobody says {key}")

    ours = Gloo("127.0.0.1")
    ours.build(Lost(), 2, [ours.address, "127.0.0.1:9"], 0)

    with pytest.raises(Severed, match=r"epoch 2 has no group: .*nobody says"):
        ours.gather(torch.ones(3), 2)


def test_who_ends_leaves_no_thread_in_gloo_that_builds_a_group_of_now_or_before() -> None:
    class Silent(Board):
        def get(self, epoch: int, key: str, _timeout_s: float) -> str:
            threading.Event().wait(3 - epoch)  # who was asked before takes longer
            raise LinkLost(f"nobody says {key}")

    ours = Gloo("127.0.0.1")
    before = threading.enumerate()
    ours.build(Silent(), 2, [ours.address, "127.0.0.1:9"], 0)
    ours.build(Silent(), 3, [ours.address, "127.0.0.1:9"], 0)
    building = [thread for thread in threading.enumerate() if thread not in before]

    ours.close()

    assert [thread for thread in building if thread.is_alive()] == []
    with pytest.raises(Severed):
        ours.all_reduce(torch.ones(3))


def test_an_error_that_no_other_epoch_would_mend_is_raised_as_it_is() -> None:
    class Wrong(Board):
        def get(self, _epoch: int, _key: str, _timeout_s: float) -> str:
            raise LookupError("no such thing")

    ours = Gloo("127.0.0.1")
    ours.build(Wrong(), 2, [ours.address, "127.0.0.1:9"], 0)

    with pytest.raises(LookupError, match="no such thing"):
        ours.all_reduce(torch.ones(3))
