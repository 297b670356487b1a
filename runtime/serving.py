"""Requests between the processes of a job: one line of JSON each, which carries the job's token.

What follows the line on the same connection is told in `framing`.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import socket
import socketserver
import threading
from collections.abc import Callable
from typing import Any

from runtime.forking import keep_from_children
from runtime.framing import PeerFailed, send_json

log = logging.getLogger("drydock.peers")

IDLE_S = 30.0  # a connection on which nothing is asked for so long is closed
MAX_LINE = 1 << 12
FIRST_LINE_S = 5.0  # how long a stranger may take to show the token
MAX_CONNECTIONS = 256  # of peers; each has a thread
MAX_STRANGERS = 64  # that have not shown the token yet, beside those
TIMEOUT_S = 5.0

STRANGER = "wrong token"

Serve = Callable[[socket.socket, dict[str, Any]], None]


class RequestServer:
    """Serves whoever knows the job's token, on background threads."""

    def __init__(
        self, host: str, token: str, serve: Serve, *, idle_s: float | None = IDLE_S, port: int = 0
    ) -> None:
        """`serve` answers one request on its connection, on a thread of that connection; what it
        raises closes it."""
        known = token.encode()
        self._strangers: dict[socket.socket, None] = {}  # whoever came first is the first
        self._peers: set[socket.socket] = set()
        self._came = False  # one of them, since we last looked
        self._changed = threading.Condition()
        outer = self

        class Handler(socketserver.StreamRequestHandler):
            timeout = idle_s
            disable_nagle_algorithm = True

            def handle(self) -> None:
                keep_from_children(self.connection)
                stranger = threading.Timer(FIRST_LINE_S, self._hang_up)
                stranger.start()
                try:
                    while line := self.rfile.readline(MAX_LINE):
                        request = admitted(self.connection, line, known)
                        stranger.cancel()
                        outer._admit(self.connection)
                        outer._answer(serve, self.connection, request)
                finally:
                    stranger.cancel()

            def _hang_up(self) -> None:
                hang_up(self.connection)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            allow_reuse_address = True
            request_queue_size = 128

            def process_request(self, request: Any, client_address: Any) -> None:
                outer._enter(request)
                try:
                    super().process_request(request, client_address)
                except BaseException:  # it has no thread, and so none that would see it leave
                    outer._leave(request)
                    raise

            def process_request_thread(self, request: Any, client_address: Any) -> None:
                try:
                    super().process_request_thread(request, client_address)
                finally:
                    outer._leave(request)

            def handle_error(self, _request: Any, _client: Any) -> None:
                log.debug("request_failed", exc_info=True)

        self._server = Server((host, port), Handler)
        keep_from_children(self._server.socket)
        self.address = f"{host}:{self._server.server_address[1]}"
        threading.Thread(
            target=self._server.serve_forever, name="drydock-peers", daemon=True
        ).start()

    def _answer(self, serve: Serve, connection: socket.socket, request: dict[str, Any]) -> None:
        """Raises what `serve` does. Who asked only sees the end of its connection: what is no
        fault of the network is ours, and is said here."""
        try:
            serve(connection, request)
        except OSError:
            raise
        except Exception:
            log.exception("request_not_served op=%s", request.get("op"))
            raise

    def await_idle(self, seconds: float) -> None:
        """Return once nobody who knows the token was connected for so long."""
        with self._changed:
            while bool(self._peers) or self._changed.wait_for(lambda: self._came, seconds):
                self._changed.wait_for(lambda: not self._peers)
                self._came = False

    def await_parted(self, seconds: float) -> None:
        """Return once nobody who knows the token is connected, after so long at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._peers, seconds)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _enter(self, connection: socket.socket) -> None:
        """A stranger came. If there are too many, the one that has had most time goes."""
        with self._changed:
            self._strangers[connection] = None
            if len(self._strangers) > MAX_STRANGERS:
                first = next(iter(self._strangers))
                del self._strangers[first]
                hang_up(first)

    def _admit(self, connection: socket.socket) -> None:
        """It has shown the token. Raises PermissionError if no more peers may be connected."""
        with self._changed:
            if connection in self._peers:
                return  # it did so before
            if connection not in self._strangers:
                raise PermissionError("it has been hung up on")
            full = len(self._peers) == MAX_CONNECTIONS
            if not full:
                del self._strangers[connection]
                self._peers.add(connection)
                self._came = True
                self._changed.notify_all()
        if full:
            why = f"{MAX_CONNECTIONS} are connected to it already, and no more may be"
            send_json(connection, {"error": why, "busy": True})
            raise PermissionError(why)

    def _leave(self, connection: socket.socket) -> None:
        with self._changed:
            self._strangers.pop(connection, None)
            self._peers.discard(connection)
            self._changed.notify_all()


class Requests:
    """Requests to one server, one after another. Connects with the first."""

    def __init__(self, address: str, token: str, timeout_s: float = TIMEOUT_S) -> None:
        self.address = address
        self._token = token
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None

    def ask(self, **message: Any) -> socket.socket:
        """Send a request; the answer is to be read from what is returned. Raises PeerFailed."""
        try:
            if self._socket is None:
                host, _, port = self.address.rpartition(":")
                self._socket = socket.create_connection((host, int(port)), self._timeout_s)
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(json.dumps({"token": self._token, **message}).encode() + b"\n")
        except OSError as error:
            self.close()
            raise PeerFailed(f"peer {self.address}: {error}") from error
        return self._socket

    def hang_up(self) -> None:
        """Whoever waits for an answer hears that none will come. On any thread."""
        connection = self._socket
        if connection is not None:
            hang_up(connection)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def hang_up(connection: socket.socket) -> None:
    """Shut down both directions of a connection; a thread that waits on it wakes.

    The socket stays open. An error is ignored: the other end hung up first, or the socket is
    closed.
    """
    with contextlib.suppress(OSError):  # it hung up first
        connection.shutdown(socket.SHUT_RDWR)


def admitted(connection: socket.socket, line: bytes, token: bytes) -> dict[str, Any]:
    """The request in this line. Raises PermissionError if its token is not the job's."""
    request: dict[str, Any] = json.loads(line)
    if not hmac.compare_digest(str(request.get("token", "")).encode(), token):
        send_json(connection, {"error": STRANGER})
        raise PermissionError("a peer gave a wrong token")
    return request
