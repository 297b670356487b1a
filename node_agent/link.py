"""One keep-alive HTTP connection to ingest: signs each request, tells refusal from silence.

Knows nothing of what the messages mean. Not safe for several threads at once: each has its own.
"""

from __future__ import annotations

import base64
import http.client
import random
import time
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node_agent import wire

T = TypeVar("T", bound=wire.Answer)

TIMEOUT_S = 10.0
#: Raised by what is no message: not JSON of its kind, no text, or brackets too deep to be read.
NOT_UNDERSTOOD = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
#: The code we give to a refusal that is not a Problem.
UNKNOWN = "unknown"
MAX_ANSWER_BYTES = 4 * wire.MAX_BODY_BYTES
#: Statuses that speak of a message, if its handler gave them. 401 and 403 speak of who sends it,
#: which may be mended, but for the code below.
OF_A_MESSAGE = frozenset({400, 404, 409, 413, 422})
NOT_ITS_COMMAND = "command_of_other_node"


class Refused(Exception):
    """The control plane answered, and said no."""

    def __init__(self, problem: wire.Problem) -> None:
        super().__init__(f"{problem.status} {problem.code}: {problem.title} {problem.detail}")
        self.problem = problem

    @property
    def about_the_message(self) -> bool:
        """Whether the message itself is at fault, so that sending it again cannot help.

        Only the handler of the message can say so: neither a page that some proxy puts in its
        place nor a wrong address is such a verdict.
        """
        at_fault = self.problem.status in OF_A_MESSAGE or self.problem.code == NOT_ITS_COMMAND
        return at_fault and self.problem.code not in {UNKNOWN, "unknown_path"}


class Unreachable(Exception):
    """No usable answer: the network, a server that is down, or something else in its place."""


class Backoff:
    """Delays that double from `first` to `most` seconds, with jitter; `reset` after a success."""

    def __init__(self, first: float, most: float) -> None:
        self.first = first
        self.most = most
        self._next = first

    def next(self) -> float:
        delay = self._next
        self._next = min(self.most, delay * 2)
        return delay * random.uniform(0.75, 1.0)  # noqa: S311 - spreads load

    def reset(self) -> None:
        self._next = self.first


class Link:
    """Posts to one ingest address. With a key and a node id, every request is signed."""

    def __init__(self, url: str, node_id: str = "", key: Ed25519PrivateKey | None = None) -> None:
        parts = urlsplit(url)
        self._prefix = parts.path.rstrip("/")
        self._host = parts.netloc
        self._tls = parts.scheme == "https"
        self._node_id = node_id
        self._key = key
        self._connection: http.client.HTTPConnection | None = None

    def post(self, path: str, body: bytes, answer: type[T], timeout_s: float = TIMEOUT_S) -> T:
        """Send one message and decode its answer. Raises Refused or Unreachable.

        A kept connection may have been closed by the server meanwhile, so a request that fails on
        one is sent again once on a fresh one: every message may safely arrive twice.
        """
        reused = self._connection is not None
        try:
            status, data = self._exchange(path, body, timeout_s)
        except (http.client.HTTPException, OSError) as error:
            self.close()
            if not reused or isinstance(error, TimeoutError):
                raise Unreachable(f"{path}: {error!r}") from error
            try:
                status, data = self._exchange(path, body, timeout_s)
            except (http.client.HTTPException, OSError) as again:
                self.close()
                raise Unreachable(f"{path}: {again!r}") from again
        return _decode(path, status, data, answer)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _exchange(self, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        if self._connection is None:
            kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
            self._connection = kind(self._host, timeout=timeout_s)
        self._connection.timeout = timeout_s
        if self._connection.sock is not None:
            self._connection.sock.settimeout(timeout_s)
        self._connection.request("POST", self._prefix + path, body, self._headers(path, body))
        response = self._connection.getresponse()
        data = response.read(MAX_ANSWER_BYTES)
        if response.will_close or not response.isclosed():
            self.close()
        return response.status, data

    def _headers(self, path: str, body: bytes) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            at = f"{time.time():.3f}"
            signature = self._key.sign(wire.signing_input(path, self._node_id, at, body))
            headers[wire.HEADER_NODE] = self._node_id
            headers[wire.HEADER_TIME] = at
            headers[wire.HEADER_SIGNATURE] = base64.b64encode(signature).decode()
        return headers


def _decode(path: str, status: int, data: bytes, answer: type[T]) -> T:
    if 200 <= status < 300:
        try:
            return msgspec.json.decode(data, type=answer)
        except NOT_UNDERSTOOD as error:
            raise Unreachable(f"{path}: answer {status} not understood: {error}") from error
    try:
        problem = msgspec.json.decode(data, type=wire.Problem)
    except NOT_UNDERSTOOD:
        text = data[:200].decode(errors="replace")
        problem = wire.Problem(status=status, code=UNKNOWN, title="Refused", detail=text)
    # The status line is what a proxy also understands: it wins over the body's copy.
    raise Refused(msgspec.structs.replace(problem, status=status))
