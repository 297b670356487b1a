"""State from a peer's memory, over TCP: snapshots and the reduced gradients made since.

Every request carries the job's token; every chunk carries its xxh3 hash. Never pickles, and never
touches the model: it serves copies that the training thread staged at a step's edge.
"""

from __future__ import annotations

import hmac
import json
import socket
import socketserver
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from runtime.snapshot import CHUNK_BYTES, Damaged, Staged

HEADER = struct.Struct("!IQ")  # length of the chunk, its xxh3-64
FETCH_TIMEOUT_S = 5.0
STAGE_TIMEOUT_S = 30.0
LOG_BYTES = 32 << 20
MAX_JSON = 64 << 20


class PeerFailed(ConnectionError):
    """This peer cannot give what was asked; ask another."""


class NotKept(PeerFailed):
    """The peer has not made this step yet, or keeps it no longer."""


@dataclass(frozen=True)
class Reduced:
    """One committed step's reduced buffer: what a peer needs to make the same step."""

    step: int
    epoch: int
    buffer: torch.Tensor


class ReducedLog:
    """The last reduced buffers, bounded by bytes; the newest two are always kept."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, Reduced] = OrderedDict()
        self._lock = threading.Lock()
        self.wanted = False  # a newcomer replays: keep more than two

    def add(self, reduced: Reduced) -> None:
        with self._lock:
            self._kept[reduced.step] = reduced
            size = reduced.buffer.numel() * reduced.buffer.element_size()
            limit = max(2, LOG_BYTES // size) if self.wanted else 2
            while len(self._kept) > limit:
                self._kept.popitem(last=False)

    def get(self, step: int) -> Reduced | None:
        with self._lock:
            return self._kept.get(step)


class PeerServer:
    """Serves this replica's state from background threads.

    `want_stage` asks the training thread to call `offer` at its next edge.
    """

    def __init__(
        self, host: str, token: str, log: ReducedLog, want_stage: Callable[[], None]
    ) -> None:
        self.log = log
        self.want_stage = want_stage
        self._token = token.encode()
        self._offered: Staged | None = None
        self._changed = threading.Condition()
        outer = self

        class Handler(socketserver.StreamRequestHandler):
            timeout = FETCH_TIMEOUT_S

            def handle(self) -> None:
                outer._serve(self.connection, self.rfile.readline(65536))

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            allow_reuse_address = True

            def handle_error(self, _request: Any, _client: Any) -> None:
                """A peer that hangs up is that peer's affair."""

        self._server = Server((host, 0), Handler)
        self.address = f"{host}:{self._server.server_address[1]}"
        threading.Thread(
            target=self._server.serve_forever, name="drydock-peers", daemon=True
        ).start()

    def offer(self, staged: Staged) -> None:
        """Called by the training thread at an edge."""
        with self._changed:
            self._offered = staged
            self._changed.notify_all()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, connection: socket.socket, line: bytes) -> None:
        request = json.loads(line)
        if not hmac.compare_digest(str(request.get("token", "")).encode(), self._token):
            send_json(connection, {"error": "wrong token"})
        elif request["op"] == "snapshot":
            self._serve_snapshot(connection)
        else:
            self._serve_reduced(connection, int(request["step"]))

    def _serve_snapshot(self, connection: socket.socket) -> None:
        self.log.wanted = True
        with self._changed:
            self._offered = None
            self.want_stage()
            if not self._changed.wait_for(lambda: self._offered is not None, STAGE_TIMEOUT_S):
                send_json(connection, {"error": "no step's edge was reached in time"})
                return
            staged = self._offered
        assert staged is not None  # noqa: S101 - the wait above
        send_json(connection, staged.describe())
        send_chunks(connection, staged.chunks())

    def _serve_reduced(self, connection: socket.socket, step: int) -> None:
        reduced = self.log.get(step)
        if reduced is None:
            send_json(connection, {"not_kept": f"step {step} is not kept here"})
            return
        size = reduced.buffer.numel() * reduced.buffer.element_size()
        send_json(connection, {"step": step, "epoch": reduced.epoch, "bytes": size})
        copy = bytearray(size)
        torch.frombuffer(copy, dtype=reduced.buffer.dtype).copy_(reduced.buffer)
        view = memoryview(copy)
        send_chunks(connection, (view[i : i + CHUNK_BYTES] for i in range(0, size, CHUNK_BYTES)))


def fetch_snapshot(address: str, token: str) -> Staged:
    """A peer's state at its next edge. Raises PeerFailed, Damaged."""
    connection = request(address, token, {"op": "snapshot"}, STAGE_TIMEOUT_S + FETCH_TIMEOUT_S)
    with connection:
        described = receive_json(connection)
        return Staged.restore(described, receive_chunks(connection, int(described["bytes"])))


def fetch_reduced(address: str, token: str, step: int) -> Reduced:
    """One committed step's reduced buffer. Raises NotKept, PeerFailed, Damaged."""
    with request(address, token, {"op": "reduced", "step": step}, FETCH_TIMEOUT_S) as connection:
        described = receive_json(connection)
        data = receive_chunks(connection, int(described["bytes"]))
        buffer = torch.frombuffer(data, dtype=torch.float32)
        return Reduced(int(described["step"]), int(described["epoch"]), buffer)


def fetch_reduced_from(donors: list[str], token: str, step: int) -> Reduced:
    """The same, from the first donor that has it. Raises PeerFailed with all their answers."""
    answers = []
    for donor in donors:
        try:
            return fetch_reduced(donor, token, step)
        except (PeerFailed, Damaged) as error:
            answers.append(f"{donor}: {error}")
    raise PeerFailed(f"no peer could hand over step {step}: {answers}")


def request(address: str, token: str, message: dict[str, Any], timeout_s: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), timeout=FETCH_TIMEOUT_S)
        connection.settimeout(timeout_s)
        connection.sendall(json.dumps({"token": token, **message}).encode() + b"\n")
    except OSError as error:
        raise PeerFailed(f"peer {address}: {error}") from error
    return connection


def send_json(connection: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    connection.sendall(struct.pack("!I", len(data)) + data)


def receive_json(connection: socket.socket) -> dict[str, Any]:
    (size,) = struct.unpack("!I", receive_exactly(connection, 4))
    if size > MAX_JSON:
        raise PeerFailed(f"a description of {size} bytes is not believable")
    message: dict[str, Any] = json.loads(receive_exactly(connection, size))
    if "error" in message:
        raise PeerFailed(message["error"])
    if "not_kept" in message:
        raise NotKept(message["not_kept"])
    return message


def send_chunks(connection: socket.socket, chunks: Iterator[memoryview]) -> None:
    for chunk in chunks:
        connection.sendall(HEADER.pack(len(chunk), xxhash.xxh3_64_intdigest(chunk)))
        connection.sendall(chunk)


def receive_chunks(connection: socket.socket, total: int) -> bytearray:
    """All chunks in one buffer. Raises Damaged at the first chunk that fails its hash."""
    buffer = bytearray(total)
    view = memoryview(buffer)
    done = 0
    while done < total:
        size, expected = HEADER.unpack(receive_exactly(connection, HEADER.size))
        if done + size > total:
            raise Damaged(f"more than the announced {total} bytes arrived")
        receive_into(connection, view[done : done + size])
        if xxhash.xxh3_64_intdigest(view[done : done + size]) != expected:
            raise Damaged(f"bytes {done} to {done + size} were changed on the way")
        done += size
    return buffer


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    buffer = bytearray(size)
    receive_into(connection, memoryview(buffer))
    return bytes(buffer)


def receive_into(connection: socket.socket, view: memoryview) -> None:
    done = 0
    while done < len(view):
        try:
            count = connection.recv_into(view[done:])
        except OSError as error:
            raise PeerFailed(str(error)) from error
        if count == 0:
            raise PeerFailed("the peer hung up")
        done += count
