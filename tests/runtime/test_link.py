"""A link that fails tells the training loop, whatever it was; one that lost its peer closes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from runtime.replica import link as module
from runtime.replica.link import Link, LinkLost
from tests.runtime.replicas import PATIENCE_S, until

MakeLink = Callable[[socket.socket, list[int]], Link]


@pytest.fixture
def make_link() -> Iterator[MakeLink]:
    """Makes links to a server, whose tests then wait for no connection for ever.

    They are closed at the end: one that went on would knock at the port of a later test's server.
    """
    with contextlib.ExitStack() as links:

        def make(server: socket.socket, broken: list[int]) -> Link:
            server.settimeout(PATIENCE_S)
            address = f"127.0.0.1:{server.getsockname()[1]}"
            join = [{"op": "join"}]
            link = Link(address, lambda: join, lambda epoch, _message: broken.append(epoch))
            links.callback(link.close, goodbye=False)
            return link

        yield make


def test_nonsense_from_the_coordinator_ends_the_wait_of_the_training_loop(
    make_link: MakeLink,
) -> None:
    broken: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = make_link(server, broken)
        link.start()
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"nonsense\n")
            message = link.inbox.get(timeout=30)

    assert message["op"] == "refused"
    assert broken == [sys.maxsize]


def test_a_refusal_is_heard_as_one(make_link: MakeLink) -> None:
    broken: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = make_link(server, broken)
        link.start()
        connection, _ = server.accept()
        with connection:
            connection.sendall(b'{"ok": false, "error": "replaced"}\n')
            message = link.inbox.get(timeout=30)

    assert (message["op"], message["error"]) == ("refused", "replaced")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b'{"ok": false, "error": "wrong token", "must_end": false}\n', "wrong token"),
        (b"HTTP/1.0 400 Bad Request\n", "it says b'HTTP/1.0 400 Bad Request', which no coord"),
        (b"[]\n", "it says b'[]', which no coordinator does"),
    ],
)
def test_one_that_trains_does_without_whoever_answers_in_the_coordinator_s_place(
    make_link: MakeLink, monkeypatch: pytest.MonkeyPatch, answer: bytes, why: str
) -> None:
    monkeypatch.setattr("runtime.replica.link.SHUN_S", 0.0)
    broken: list[int] = []
    told: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = make_link(server, broken)
        link.trains, link.on_strange = lambda: True, told.append
        link.start()
        for _ in range(3):
            connection, _ = server.accept()
            with connection:
                connection.sendall(answer)
        connection, _ = server.accept()  # it has come back, and all is well
        with connection:
            connection.sendall(b'{"op": "edge", "epoch": 1}\n')
            heard = link.inbox.get(timeout=30)

    assert heard["op"] == "edge"
    assert broken == []
    assert len(told) == 1
    assert why in told[0]


def test_one_that_trains_ends_if_another_has_its_place(make_link: MakeLink) -> None:
    broken: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = make_link(server, broken)
        link.trains = lambda: True
        link.start()
        connection, _ = server.accept()
        with connection:
            connection.sendall(b'{"ok": false, "error": "replaced", "must_end": true}\n')
            message = link.inbox.get(timeout=30)

    assert (message["op"], broken) == ("refused", [sys.maxsize])


def test_who_is_refused_hears_so_though_the_epoch_cannot_be_broken(make_link: MakeLink) -> None:
    def runs_short(_epoch: int, _message: dict[str, Any]) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with socket.create_server(("127.0.0.1", 0)) as server:
        link = make_link(server, [])
        link.on_break = runs_short
        link.start()
        connection, _ = server.accept()
        with connection:
            connection.sendall(b'{"ok": false, "error": "replaced", "must_end": true}\n')
            message = link.inbox.get(timeout=30)

    assert message["op"] == "refused"


def test_closing_after_the_coordinator_hung_up(make_link: MakeLink) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = make_link(server, [])
        link.start()
        connection, _ = server.accept()
        until(lambda: link._socket is not None, "the link stands")
        held = link._socket
        assert held is not None
        held.shutdown(socket.SHUT_RDWR)
        connection.close()

        link.close(goodbye=True)


def test_one_that_is_closed_as_it_connects_does_not_join(make_link: MakeLink) -> None:
    """Its goodbye had nobody to go to: it would be a member that only answers."""
    connecting, closed = threading.Event(), threading.Event()

    def on_connect() -> None:
        connecting.set()
        assert closed.wait(PATIENCE_S)

    with socket.create_server(("127.0.0.1", 0)) as server:
        link = make_link(server, [])
        link.on_connect = on_connect
        link.start()
        assert connecting.wait(PATIENCE_S)
        closing = threading.Thread(target=link.close, kwargs={"goodbye": True})
        closing.start()
        until(link._closing.is_set, "it closes")
        closed.set()
        connection, _ = server.accept()
        with connection:
            said = connection.recv(1 << 16)
        closing.join(PATIENCE_S)

    assert said == b""


def test_a_value_is_not_waited_for_while_the_coordinator_is_away(make_link: MakeLink) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = make_link(server, [])  # never started: it has no connection

        with pytest.raises(LinkLost, match="away"):
            link.get(1, "key", timeout_s=30)


def test_what_was_left_for_an_epoch_is_said_again_to_a_coordinator_started_anew(
    make_link: MakeLink,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = make_link(server, [])
        link.set(1, "of an epoch before", "a")
        link.set(2, "said while it is away", "b")
        link.start()
        first, _ = server.accept()
        with first, first.makefile() as lines:
            heard = [json.loads(lines.readline()) for _ in range(2)]
            link.set(2, "said and lost", "c")
            lines.readline()
        second, _ = server.accept()
        with second, second.makefile() as lines:
            again = [json.loads(lines.readline()) for _ in range(3)]
        link.close(goodbye=False)

    assert [one.get("value") for one in heard] == [None, "b"]
    assert [one.get("value") for one in again] == [None, "b", "c"]
    assert {one["epoch"] for one in again[1:]} == {2}


def test_who_finds_no_coordinator_says_where_it_looked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "AWAY_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    link = Link(address, list, lambda _epoch, _message: None)
    link.start()

    until(lambda: caplog.messages, "it says so")
    link.close(goodbye=False)

    assert f"out_of_reach address={address}" in caplog.text
    assert "DRYDOCK_COORDINATOR" in caplog.text


def test_one_that_nobody_else_can_replace_is_given_up_when_it_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "REACH_S", 0.2)
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    link = Link(address, list, lambda _epoch, _message: None, on_end=ended.set)
    link.start()

    assert ended.wait(30)
    link.close(goodbye=False)


def test_a_number_that_was_never_answered_here_does_no_harm(make_link: MakeLink) -> None:
    """A new connection may hear of answers that were given on the one before it."""
    broken: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = make_link(server, broken)
        link.start()
        connection, _ = server.accept()
        with connection:
            connection.sendall(b'{"op": "ping", "n": 1, "heard": 7}\n{"op": "stop"}\n')
            assert link.inbox.get(timeout=30)["op"] == "stop"
            link.close(goodbye=True)

    assert broken == []


def test_a_value_that_does_not_come_in_time_is_forgotten(make_link: MakeLink) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = make_link(server, [])
        link.start()
        connection, _ = server.accept()
        until(lambda: link._socket is not None, "the link stands")
        with connection, pytest.raises(TimeoutError):
            link.get(1, "key", timeout_s=0.05)

        assert not link._calls
        link.close(goodbye=True)


def test_while_its_machine_slept_the_coordinator_did_not_hear_of_a_member(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = time.clock_gettime
    link = Link("127.0.0.1:1", list, lambda _epoch, _message: None)
    awake = link.silent_s()
    monkeypatch.setattr(
        time, "clock_gettime", lambda which: clock(which) + 600 * (which == time.CLOCK_BOOTTIME)
    )

    assert awake < 600 <= link.silent_s()
