"""What comes from the network is never unpickled: a pickle that would act does nothing, wherever it
is sent, and whoever sends it is hung up on."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import xxhash

from runtime.checkpoint import peer
from runtime.checkpoint.holder import Holder, Label
from runtime.client import Sender, Trouble
from runtime.framing import HEADER, LENGTH, PeerFailed, receive_json
from runtime.image import CHUNK_BYTES, Damaged
from runtime.replica.fetching import Follower, fetch_reduced, fetch_state
from runtime.replica.link import Link
from runtime.replica.peers import PeerServer, ReducedLog
from runtime.replica.siblings import Siblings
from runtime.serving import Requests, RequestServer
from runtime.snapshot import bytes_of, stage
from tests.runtime.replicas import TOKEN, Fleet

PATIENCE_S = 30.0
STAGED = stage({"weight": torch.arange(CHUNK_BYTES >> 2, dtype=torch.float32)}, 7)
LABEL = Label(run="r", rank=0, ranks=1, step=7, save="save7", epoch=1, bytes=STAGED.table.bytes)


class Acts:
    """Loaded from a pickle it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """It is there once the pickle was loaded."""
    return tmp_path / "it-acted"


@pytest.fixture
def pickled(trace: Path) -> bytes:
    found = pickle.dumps(Acts(trace))
    assert b"\n" not in found  # so that it passes for one line
    return found


def test_who_loads_it_sees_it_act(pickled: bytes, trace: Path) -> None:
    pickle.loads(pickled)  # noqa: S301 - our own

    assert trace.exists()


def bare(data: bytes) -> bytes:
    return data


def as_description(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


def as_chunk(data: bytes) -> bytes:
    """With the hash that it has."""
    return HEADER.pack(len(data), xxhash.xxh3_128_digest(data)) + data


ANY_FORM = pytest.mark.parametrize("form", [bare, as_description, as_chunk])
Form = Callable[[bytes], bytes]


# --- sent to those who listen: each by its address, and a first line that it takes with the token -


def state_server(stack: ExitStack) -> tuple[str, dict[str, Any]]:
    server = PeerServer("127.0.0.1", TOKEN, ReducedLog(), lambda _step, _digest: None)
    stack.callback(server.close)
    return server.address, {"op": "reduced", "step": 8, "wait_s": 0.0, "settled": False}


def holder(stack: ExitStack) -> tuple[str, dict[str, Any]]:
    server = RequestServer("127.0.0.1", TOKEN, Holder().serve)
    stack.callback(server.close)
    return server.address, {"op": "list"}


def first_rank(stack: ExitStack) -> tuple[str, dict[str, Any]]:
    link = Link("127.0.0.1:1", list, lambda _epoch, _message: None)
    ranks = Siblings("127.0.0.1", TOKEN, 2, link, lambda _r, _m: None, lambda _rank: None)
    stack.callback(ranks.close)
    places = {"address": "127.0.0.1:1", "gloo": "127.0.0.1:2", "holder": {}}
    return ranks.address, {"op": "join", "rank": 1, "shape": {}, **places}


def coordinator(stack: ExitStack) -> tuple[str, dict[str, Any]]:
    fleet = Fleet(Path(stack.enter_context(TemporaryDirectory())), 1)
    stack.callback(fleet.close)
    fleet.start_coordinator()
    replica = {"replica": 0, "placement": "p", "standby": "", "world": 1, "shards": 12}
    standing = {"job": "job_t", "epoch": 0, "step": -1, "members": {}, "shape": {}}
    places = {"addresses": ["127.0.0.1:1"], "gloo": ["127.0.0.1:2"]}
    return f"127.0.0.1:{fleet.port}", {"op": "join", **replica, **standing, **places}


Listener = Callable[[ExitStack], tuple[str, dict[str, Any]]]
EACH = pytest.mark.parametrize("listener", [state_server, holder, first_rank, coordinator])


def hung_up(connection: socket.socket) -> bool:
    """Read what it still says, to the end of the connection."""
    connection.settimeout(PATIENCE_S)
    with contextlib.suppress(ConnectionResetError):  # it had not read all of ours
        while connection.recv(1 << 16):
            pass
    return True


def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), PATIENCE_S)


@EACH
def test_it_is_no_first_word(listener: Listener, pickled: bytes, trace: Path) -> None:
    with ExitStack() as stack:
        address, _first = listener(stack)
        connection = stack.enter_context(connected(address))
        connection.sendall(pickled + b"\n")

        assert hung_up(connection)
    assert not trace.exists()


@EACH
def test_it_is_no_word_of_one_who_knows_the_token_either(
    listener: Listener, pickled: bytes, trace: Path
) -> None:
    with ExitStack() as stack:
        address, first = listener(stack)
        connection = stack.enter_context(connected(address))
        connection.sendall(json.dumps({"token": TOKEN, **first}).encode() + b"\n")
        connection.sendall(pickled + b"\n")

        assert hung_up(connection)
    assert not trace.exists()


DESCRIBED = {"table": STAGED.table.describe(), "facts": {}, "same": 0}


@pytest.mark.parametrize(
    "before", [b"", as_description(json.dumps(DESCRIBED).encode())], ids=["described", "chunk"]
)
@ANY_FORM
def test_it_is_no_state_to_be_held(pickled: bytes, trace: Path, before: bytes, form: Form) -> None:
    with ExitStack() as stack:
        address, _list = holder(stack)
        connection = Requests(address, TOKEN).ask(op="hold", **vars(LABEL))
        stack.enter_context(connection)
        assert receive_json(connection) == {"newest": ""}
        connection.sendall(before + form(pickled))

        assert hung_up(connection)
        assert peer.held(address, TOKEN) == []
    assert not trace.exists()


# --- sent to those who ask ------------------------------------------------------------------------


class Liar:
    """A peer that knows the token, and answers whatever the test says."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {}  # by what is asked for
        self._server = RequestServer("127.0.0.1", TOKEN, self._serve)
        self.address = self._server.address
        self.close = self._server.close

    def _serve(self, connection: socket.socket, request: dict[str, Any]) -> None:
        connection.sendall(self.answers[request["op"]])

    def is_hung_up_on(self) -> bool:
        self._server.await_parted(PATIENCE_S)
        return not self._server._peers


@pytest.fixture(scope="module")
def liar() -> Iterator[Liar]:
    liar = Liar()
    yield liar
    liar.close()


@ANY_FORM
def test_it_is_no_manifest(liar: Liar, pickled: bytes, trace: Path, form: Form) -> None:
    liar.answers["manifest"] = form(pickled)

    with pytest.raises(PeerFailed, match="no peer holds step 7"):
        fetch_state([liar.address], TOKEN, 7, STAGED.digest)

    assert liar.is_hung_up_on()
    assert not trace.exists()


@pytest.mark.parametrize(
    "chunk", [bare, lambda data: as_chunk(data.ljust(CHUNK_BYTES, b"\0"))], ids=["bare", "hashed"]
)
def test_it_is_no_chunk(liar: Liar, pickled: bytes, trace: Path, chunk: Form) -> None:
    liar.answers["manifest"] = as_description(json.dumps(STAGED.describe()).encode())
    liar.answers["chunks"] = chunk(pickled)

    with pytest.raises(PeerFailed, match="1 pieces of the state are missing"):
        fetch_state([liar.address], TOKEN, 7, STAGED.digest)

    assert liar.is_hung_up_on()
    assert not trace.exists()


@ANY_FORM
def test_it_is_no_reduced_step(liar: Liar, pickled: bytes, trace: Path, form: Form) -> None:
    liar.answers["reduced"] = form(pickled)

    with pytest.raises(PeerFailed, match="no peer could hand over step 8"):
        fetch_reduced([liar.address], TOKEN, 8)

    assert liar.is_hung_up_on()
    assert not trace.exists()


@ANY_FORM
def test_it_is_no_step_to_follow(liar: Liar, pickled: bytes, trace: Path, form: Form) -> None:
    liar.answers["reduced"] = form(pickled)
    heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    Follower([liar.address], TOKEN, 8, heard.put)

    assert heard.get(timeout=PATIENCE_S)["op"] == "cannot_follow"
    assert liar.is_hung_up_on()
    assert not trace.exists()


def test_it_is_no_part_of_a_reduced_step(liar: Liar, pickled: bytes, trace: Path) -> None:
    liar.answers["reduced"] = described_step(400) + pickled

    with pytest.raises(PeerFailed, match="no peer could hand over step 8"):
        fetch_reduced([liar.address], TOKEN, 8)

    assert liar.is_hung_up_on()
    assert not trace.exists()


def test_with_the_hash_of_a_reduced_step_it_is_taken_for_numbers(
    liar: Liar, pickled: bytes, trace: Path
) -> None:
    """Whoever knows the token may give any gradient; but no more than that."""
    data = pickled.ljust(400, b"\0")
    liar.answers["reduced"] = described_step(400) + as_chunk(data)

    found = fetch_reduced([liar.address], TOKEN, 8)

    assert bytes(bytes_of(found.buffer)) == data
    assert liar.is_hung_up_on()
    assert not trace.exists()


def described_step(size: int) -> bytes:
    return as_description(json.dumps({"step": 8, "epoch": 1, "bytes": size}).encode())


@ANY_FORM
@pytest.mark.parametrize(
    "ask",
    [
        lambda address: peer.held(address, TOKEN),
        lambda address: peer.read(address, TOKEN, 0, "save7", STAGED.digest),
        lambda address: peer.Keeping(address, TOKEN).hold(
            LABEL, STAGED.table, {}, memoryview(STAGED.buffer)
        ),
    ],
    ids=["list", "read", "hold"],
)
def test_it_is_no_answer_of_a_holder(
    liar: Liar, pickled: bytes, trace: Path, ask: Callable[[str], object], form: Form
) -> None:
    liar.answers = dict.fromkeys(["list", "read", "hold"], form(pickled))

    with pytest.raises(PeerFailed):
        ask(liar.address)

    assert liar.is_hung_up_on()
    assert not trace.exists()


def test_it_is_no_chunk_of_what_is_held(liar: Liar, pickled: bytes, trace: Path) -> None:
    described = {"step": 7, **STAGED.table.describe()}
    liar.answers["read"] = as_description(json.dumps(described).encode()) + pickled

    with pytest.raises(Damaged, match="where 1048576 were due"):
        peer.read(liar.address, TOKEN, 0, "save7", STAGED.digest)

    assert liar.is_hung_up_on()
    assert not trace.exists()


@pytest.mark.parametrize("trains", [False, True])
def test_it_is_no_word_of_a_coordinator_or_first_rank(
    monkeypatch: pytest.MonkeyPatch, pickled: bytes, trace: Path, trains: bool
) -> None:
    monkeypatch.setattr("runtime.replica.link.SHUN_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_S)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        link = Link(address, lambda: [{"op": "join"}], lambda _epoch, _message: None)
        link.trains = lambda: trains
        link.start()
        connection, _ = server.accept()
        with connection:
            connection.sendall(pickled + b"\n")

            assert hung_up(connection)
        link.close(goodbye=False)
    assert not trace.exists()


def test_it_is_no_answer_of_the_control_plane(pickled: bytes, trace: Path) -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(pickled)}\r\n\r\n".encode()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_S)
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        sender = Sender(url, TOKEN, job="job_t", replica=0, rank=0, placement="plc_0")
        sender.start()
        sender.tell(Trouble(kind="k", text="t", at=1.0))
        for _ in range(2):  # it tries again
            connection, _ = server.accept()
            with connection:
                connection.sendall(head + pickled)

                assert hung_up(connection)
    sender.close(0.0)
    assert not trace.exists()
