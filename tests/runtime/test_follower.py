"""A rank that its replica's first one leads, as it comes and as it ends."""

from __future__ import annotations

import queue
import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest

from runtime.replica.follower import Follower
from runtime.replica.rank import Rank
from tests.runtime.replicas import PATIENCE_S


def nothing(*_given: object, **_named: object) -> None:
    """Nobody waits for it."""


def test_it_says_in_what_it_must_be_like_the_first_rank() -> None:
    job = SimpleNamespace(token="t", rank=1)
    saver = SimpleNamespace(dispatcher=SimpleNamespace())
    rank: Any = SimpleNamespace(
        job=job, saver=saver, address="here:1", holder={}, gloo=SimpleNamespace(address="there:1")
    )

    follower = Follower(
        cast(Rank, rank), "127.0.0.1:1", {"seed": "7"}, leave=nothing, abandon=nothing
    )

    (said,) = follower.introduce()
    assert (said["rank"], said["shape"]) == (1, {"seed": "7"})


def test_a_read_is_given_up_as_that_is_heard_whatever_it_does_meanwhile() -> None:
    given_up: queue.Queue[int] = queue.Queue()
    saver = SimpleNamespace(dispatcher=SimpleNamespace())
    rank: Any = SimpleNamespace(
        job=SimpleNamespace(token="t", rank=1), saver=saver, address="here:1", holder={},
        gloo=SimpleNamespace(address="there:1"), give_up=given_up.put,
    )  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_S)
        first = f"127.0.0.1:{server.getsockname()[1]}"
        follower = Follower(cast(Rank, rank), first, {}, leave=nothing, abandon=nothing)
        follower.start()
        connection, _ = server.accept()
        with connection:
            connection.sendall(b'{"op": "read"}\n{"op": "give_up", "number": 3}\n{"op": "load"}\n')
            heard = given_up.get(timeout=30)  # and nobody has taken the order to read
            orders = [follower.link.inbox.get(timeout=30)["op"] for _ in range(2)]
        follower._left.set()

    assert (heard, orders) == (3, ["read", "load"])


@pytest.mark.parametrize(
    ("goodbye", "order"),
    [
        (True, ["saves end", "hangs up"]),  # of which the first rank is told
        (False, ["hangs up", "saves end", "hangs up"]),  # so that the others go on at once
    ],
)
def test_who_ends_for_an_error_keeps_nobody_waiting_for_its_saves(
    goodbye: bool, order: list[str]
) -> None:
    done: list[str] = []
    saver = SimpleNamespace(dispatcher=SimpleNamespace(), finish=lambda: done.append("saves end"))
    rank: Any = SimpleNamespace(job=None, saver=saver)
    follower = Follower(cast(Rank, rank), "127.0.0.1:1", {}, leave=nothing, abandon=nothing)
    hangs_up = SimpleNamespace(close=lambda goodbye: done.append("hangs up"))
    follower.link = rank.link = cast(Any, hangs_up)

    follower.close(goodbye=goodbye)

    assert done == order
