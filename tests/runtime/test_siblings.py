"""The lines between the ranks of one replica: who may come, what is passed on, whose end counts."""

from __future__ import annotations

import errno
import json
import queue
import select
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import pytest

from runtime.replica import siblings as module
from runtime.replica.link import Link, LinkLost
from runtime.replica.siblings import Incomplete, Siblings
from tests.runtime.replicas import until


class Coordinator(Link):
    """Its end of the leader's link: what it was told, and values as they come."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1:1", list, lambda _epoch, _message: None)
        self.ponged: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.values: dict[str, Future[str]] = {"0:a": Future()}
        self.given: dict[str, str] = {}

    def pong(self, number: int) -> None:
        self.ponged.put(number)

    def set(self, _epoch: int, key: str, value: str) -> None:
        self.given[key] = value

    def ask(self, _epoch: int, key: str) -> Future[str]:
        return self.values[key]


def connection_to(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


SHAPE = {"seed": "7", "data": "Rows"}


class Sibling:
    """Another rank, by hand."""

    def __init__(
        self, address: str, rank: int, shown: str = "right", shape: dict[str, str] = SHAPE
    ) -> None:
        self.connection = connection_to(address)
        self.lines = self.connection.makefile("r")
        places = {"address": f"here:{rank}", "gloo": f"there:{rank}", "holder": {}}
        self.say(op="join", token=shown, rank=rank, shape=shape, **places)

    def say(self, **message: Any) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> dict[str, Any]:
        heard: dict[str, Any] = json.loads(self.lines.readline())
        return heard


class Leader:
    """The first rank of three, and what it hears."""

    def __init__(self) -> None:
        self.link = Coordinator()
        self.said: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
        self.lost: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.siblings = Siblings(
            "127.0.0.1", "right", 3, self.link, lambda r, m: self.said.put((r, m)), self.lost.put,
            SHAPE,
        )  # fmt: skip


@pytest.fixture
def leader() -> Leader:
    return Leader()


@pytest.fixture
def come(leader: Leader) -> Iterator[Callable[..., Sibling]]:
    with ExitStack() as stack:

        def connect(rank: int, *shown: Any) -> Sibling:
            sibling = Sibling(leader.siblings.address, rank, *shown)
            stack.enter_context(sibling.connection)
            return sibling

        yield connect


@pytest.fixture
def others(leader: Leader, come: Callable[..., Sibling]) -> list[Sibling]:
    found = [come(2), come(1)]
    leader.siblings.meet()
    return found[::-1]


def test_the_others_are_met_in_their_order(leader: Leader, come: Callable[..., Sibling]) -> None:
    come(2)
    come(1)

    assert [(one.address, one.gloo) for one in leader.siblings.meet()] == [
        ("here:1", "there:1"),
        ("here:2", "there:2"),
    ]


def test_who_is_missing_is_named(
    leader: Leader, come: Callable[..., Sibling], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MEET_S", 0.2)
    come(1)
    until(lambda: 1 in leader.siblings._there, "it is there")

    with pytest.raises(Incomplete, match=r"ranks \[2\] of this replica of 3 did not come"):
        leader.siblings.meet()


def test_who_went_before_all_had_met_is_missing(
    leader: Leader, come: Callable[..., Sibling], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MEET_S", 0.2)
    come(2)
    come(1).connection.shutdown(socket.SHUT_RDWR)

    assert leader.lost.get(timeout=30) == 1
    until(lambda: 2 in leader.siblings._there, "the other is there")
    with pytest.raises(Incomplete, match=r"ranks \[1\] of this replica"):
        leader.siblings.meet()


def test_a_connection_to_the_coordinator_waits_until_all_ranks_answer(
    leader: Leader, others: list[Sibling]
) -> None:
    here = threading.Event()

    def call() -> None:
        leader.link.on_connect()
        here.set()

    threading.Thread(target=call, daemon=True).start()
    asked = [one.hear() for one in others]
    others[0].say(op="pong", n=asked[0]["n"])
    others[0].say(op="staged", step=1, digest="d")
    leader.said.get(timeout=30)  # so its answer was heard
    early = here.is_set()
    others[1].say(op="pong", n=asked[1]["n"])

    assert here.wait(30)
    assert not early
    assert leader.link.ponged.empty()


@pytest.mark.parametrize(
    ("rank", "token", "why"),
    [
        (1, "guessed", "wrong token"),
        (3, "right", "no place for a rank 3"),
        (0, "right", "no place for a rank 0"),
    ],
)
def test_who_is_none_of_the_replica_is_refused(
    come: Callable[..., Sibling], rank: int, token: str, why: str
) -> None:
    answer = come(rank, token).hear()

    assert answer["op"] == "refused"
    assert why in answer["error"]


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (
            {**SHAPE, "seed": "8"},
            "this rank's data order's seed is 8, that of the first rank of its replica is 7: "
            "give all ranks the same seed",
        ),
        (
            {"seed": "7"},
            "this rank's dataset is not told, that of the first rank of its replica is Rows: "
            "run all ranks with one version of Drydock",
        ),
    ],
)
def test_a_rank_that_would_train_otherwise_than_the_first_is_refused(
    leader: Leader, come: Callable[..., Sibling], shape: dict[str, str], why: str
) -> None:
    assert come(1, "right", shape).hear() == {"op": "refused", "error": why}
    with pytest.raises(Incomplete, match=f"rank 1 of this replica was refused: {why}"):
        leader.siblings.meet()


def test_who_shows_a_wrong_token_hears_nothing_of_the_shape(come: Callable[..., Sibling]) -> None:
    assert "wrong token" in come(1, "guessed", {"seed": "8"}).hear()["error"]


def test_a_rank_that_is_there_is_not_replaced(leader: Leader, come: Callable[..., Sibling]) -> None:
    come(1)
    until(lambda: leader.siblings._there, "the first is there")

    assert "no place for a rank 1" in come(1).hear()["error"]


def test_once_all_have_met_nobody_can_come(
    others: list[Sibling], come: Callable[..., Sibling]
) -> None:
    with pytest.raises(ConnectionRefusedError):
        come(1)


def test_a_stranger_who_says_its_line_slowly_is_hung_up_on(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_LINE_S", 0.5)

    with connection_to(leader.siblings.address) as stranger:
        assert any(is_hung_up_on_after_a_byte(stranger) for _ in range(100))


def is_hung_up_on_after_a_byte(stranger: socket.socket) -> bool:
    stranger.sendall(b" ")
    readable, _, _ = select.select([stranger], [], [], 0.05)
    return bool(readable)


def test_strangers_keep_no_rank_out(
    leader: Leader, come: Callable[..., Sibling], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_LINE_S", 60.0)
    monkeypatch.setattr(module, "MAX_STRANGERS", 1)
    with ExitStack() as stack:
        address = leader.siblings.address
        strangers = [stack.enter_context(connection_to(address)) for _ in range(3 + 1 + 1)]

        assert strangers[0].recv(1) == b""
        for rank in (1, 2):
            come(rank)
        assert len(leader.siblings.meet()) == 2


@pytest.mark.parametrize(
    ("kind", "method", "error"),
    [
        (socket.socket, "accept", OSError(errno.EMFILE, "Too many open files")),
        (threading.Thread, "start", RuntimeError("can't start new thread")),
    ],
)
def test_a_connection_that_cannot_be_served_keeps_no_other_out(
    leader: Leader,
    come: Callable[..., Sibling],
    monkeypatch: pytest.MonkeyPatch,
    kind: type,
    method: str,
    error: Exception,
) -> None:
    monkeypatch.setattr(module, "MEET_S", 20.0)
    failed = threading.Event()

    def fails(*_given: object) -> None:
        failed.set()
        raise error

    with monkeypatch.context() as short_of_it, connection_to(leader.siblings.address):
        short_of_it.setattr(kind, method, fails)
        with connection_to(leader.siblings.address):
            assert failed.wait(30)
    for rank in (1, 2):
        come(rank)

    assert len(leader.siblings.meet()) == 2


def test_an_order_goes_to_all_and_answers_come_back_by_rank(
    leader: Leader, others: list[Sibling]
) -> None:
    leader.siblings.tell("read", step=7)
    heard = [one.hear() for one in others]
    others[1].say(op="answer", value=2)
    others[0].say(op="answer", value=1)

    assert heard == [{"op": "read", "step": 7}] * 2
    assert leader.siblings.answers() == [{"value": 1}, {"value": 2}]


def test_that_an_order_failed_is_known_before_its_answer_is_read(
    leader: Leader, others: list[Sibling]
) -> None:
    failed: list[dict[str, Any]] = []
    leader.siblings.on_failed = failed.append
    others[0].say(op="answer", value=1)
    others[1].say(op="answer", failed="severed", text="it broke")

    until(lambda: failed, "it is heard though nobody reads")
    assert failed == [{"failed": "severed", "text": "it broke"}]
    assert leader.siblings.answers() == [{"value": 1}, *failed]


def test_a_ping_is_answered_once_all_have(leader: Leader, others: list[Sibling]) -> None:
    leader.link.on_ping(4)
    first = [one.hear() for one in others]
    others[0].say(op="pong", n=first[0]["n"])
    leader.link.on_ping(1)  # on a new connection to the coordinator
    second = [one.hear() for one in others]
    others[0].say(op="pong", n=second[0]["n"])
    others[1].say(op="pong", n=first[1]["n"])
    others[1].say(op="pong", n=second[1]["n"])

    assert [leader.link.ponged.get(timeout=30), leader.link.ponged.get(timeout=30)] == [4, 1]


def test_values_are_passed_on_when_they_are_there(leader: Leader, others: list[Sibling]) -> None:
    others[0].say(op="set", epoch=3, key="1:b", value="mine")
    others[0].say(op="get", epoch=3, key="0:a", id=9)
    until(lambda: leader.link.given == {"1:b": "mine"}, "the value is given on")
    leader.link.values["0:a"].set_result("theirs")

    assert others[0].hear() == {"op": "value", "id": 9, "value": "theirs"}


def test_a_value_that_will_not_come_is_told_too(leader: Leader, others: list[Sibling]) -> None:
    leader.link.values["0:a"].set_exception(LinkLost("the epoch broke"))
    others[1].say(op="get", epoch=3, key="0:a", id=1)

    assert others[1].hear() == {"op": "value", "id": 1, "error": "the epoch broke"}


def test_a_lost_rank_is_told_of_and_one_that_took_leave_is_not(
    leader: Leader, others: list[Sibling]
) -> None:
    others[0].say(op="goodbye")
    others[0].connection.shutdown(socket.SHUT_RDWR)
    others[1].say(op="staged", step=1, digest="d")
    assert leader.said.get(timeout=30) == (2, {"op": "staged", "step": 1, "digest": "d"})
    others[1].connection.shutdown(socket.SHUT_RDWR)

    assert leader.lost.get(timeout=30) == 2
    assert leader.lost.empty()
    with pytest.raises(Incomplete, match="rank 1 of this replica has left the loop"):
        leader.siblings.answers()


@pytest.mark.parametrize("line", [b"nonsense\n", b"{}\n", b'{"op": "pong"}\n'])
def test_a_rank_that_talks_nonsense_is_lost(
    leader: Leader, others: list[Sibling], line: bytes
) -> None:
    others[0].connection.sendall(line)

    assert leader.lost.get(timeout=30) == 1
