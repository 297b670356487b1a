"""Who reaches whom, and whom the others do without: over real sockets, and as a property."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.replica import reach
from runtime.replica.reach import apart, unreached
from tests.ports import free_port

MEMBERS = st.integers(0, 5)
STEPS = st.dictionaries(MEMBERS, st.integers(7, 9), min_size=1)
UNREACHED = st.dictionaries(MEMBERS, st.sets(MEMBERS))


@pytest.fixture
def silent() -> Iterator[str]:
    """An address at which nothing answers: its queue is full, and the kernel drops what comes."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield "{}:{}".format(*server.getsockname())


def test_only_who_answers_nothing_is_out_of_reach(silent: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        listening = "{}:{}".format(*server.getsockname())
        ended = f"127.0.0.1:{free_port()}"  # its machine answers that nobody listens

        assert unreached([listening, silent, ended]) == [1]


def test_who_may_open_no_more_files_says_nothing_of_others(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault is its own, and it tries on: see `epochs_break`."""

    def full() -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socket", full)

    assert unreached([silent]) == []


def test_of_who_answered_no_connection_is_kept_while_others_are_waited_for(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[socket.socket] = []
    make = socket.socket

    def kept() -> socket.socket:
        asked.append(make())
        return asked[-1]

    open_while_waited: list[int] = []
    answers = reach._answers

    def watched(selector: selectors.BaseSelector, limit_s: float) -> list[int]:
        found = answers(selector, limit_s)
        open_while_waited.append(sum(one.fileno() >= 0 for one in asked))
        return found

    with socket.create_server(("127.0.0.1", 0)) as server:
        listening = "{}:{}".format(*server.getsockname())
        monkeypatch.setattr(socket, "socket", kept)
        monkeypatch.setattr(reach, "_answers", watched)
        assert unreached([listening, silent]) == [1]

    assert open_while_waited[-1] == 2  # both tries of the silent one


class Far:
    """A connection to a machine so far away that the first try is answered during the second."""

    tries: list[Far] = []

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._ours.send(bytes(1 << 16))
        self.tries.append(self)

    def connect_ex(self, _address: object) -> int:
        if len(self.tries) == 2:
            self.tries[0].answer()
        return errno.EINPROGRESS

    def answer(self) -> None:
        """From now on it can be written to, as one that stands."""
        self._theirs.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._theirs.recv(1 << 20)

    def getsockopt(self, *_which: int) -> int:
        return 0

    def setblocking(self, _blocks: bool) -> None:
        """It never does."""

    def fileno(self) -> int:
        return self._ours.fileno()

    def __enter__(self) -> Far:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


@pytest.mark.parametrize("try_s", [0.1, 0.0])
def test_an_answer_from_far_away_counts_also_for_who_stood_still(
    try_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Far, "tries", [])
    sockets = SimpleNamespace(socket=Far, SOL_SOCKET=socket.SOL_SOCKET, SO_ERROR=socket.SO_ERROR)
    monkeypatch.setattr(reach, "socket", sockets)

    assert unreached(["10.0.0.1:1"], try_s) == []
    assert len(Far.tries) == 2


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({0: [1], 1: [0], 2: [], 3: []}, [1]),  # of two equals the later number
        ({0: [1, 2, 3], 1: [0], 2: [0], 3: [0]}, [0]),  # who is out of most others' reach
        ({0: [], 1: [], 2: [0], 3: [0]}, [0]),  # one direction suffices
        ({0: [2, 3], 1: [2, 3], 2: [0, 1], 3: [0, 1]}, [3, 2]),  # two halves
        ({0: [], 1: [], 2: [], 3: []}, []),
    ],
)
def test_whom_to_do_without(found: dict[int, list[int]], expected: list[int]) -> None:
    assert apart(found, dict.fromkeys(range(4), 7)) == expected


def test_of_two_the_one_that_is_behind_goes() -> None:
    assert apart({0: [1], 1: []}, {0: 7, 1: 8}) == [0]


@given(found=UNREACHED, steps=STEPS)
def test_all_that_are_left_reach_each_other_and_nobody_goes_without_need(
    found: dict[int, set[int]], steps: dict[int, int]
) -> None:
    without = apart(found, steps)

    left = set(steps) - set(without)
    in_doubt = {n for one, others in found.items() for other in others for n in (one, other)}
    assert all(found.get(replica, set()).isdisjoint(left - {replica}) for replica in left)
    assert set(without) <= in_doubt & set(steps)
