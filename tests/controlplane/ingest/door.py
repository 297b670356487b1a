"""Clients and servers for the tests of ingest: real processes, real sockets, real signatures."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import msgspec
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from django.db import connection

from controlplane.ids import new_id
from node_agent import wire
from tests.ports import free_port

#: Within this a poll that is held for as long as may be is answered only if something ended it.
SOONER_S = wire.MAX_POLL_S - 5.0


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    json: Any

    @property
    def code(self) -> str:
        return str(self.json["code"])


@dataclass
class Pending:
    """A request that was sent and not yet answered."""

    connection: http.client.HTTPConnection

    def answer(self, timeout: float = 40.0) -> Answer:
        assert self.connection.sock is not None
        self.connection.sock.settimeout(timeout)
        response = self.connection.getresponse()
        named = {name.lower(): value for name, value in response.getheaders()}
        content = json.loads(response.read() or b"null")
        self.connection.close()
        return Answer(response.status, named, content)

    def hang_up(self) -> None:
        self.connection.close()


@dataclass
class Door:
    """Speaks HTTP to one server, a connection per request."""

    port: int

    def request(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> Answer:
        return self.begin(method, path, body, headers or {}).answer()

    def begin(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> Pending:
        """Send a request; its answer is read when asked for."""
        opened = http.client.HTTPConnection("127.0.0.1", self.port, timeout=40)
        opened.request(method, path, body=body, headers=headers)
        return Pending(opened)

    def post(self, path: str, message: object, **headers: str) -> Answer:
        return self.request("POST", path, msgspec.json.encode(message), headers)


@dataclass
class NodeClient:
    """A node with its key."""

    door: Door
    name: str
    join_token: str
    boot_id: str = "boot-1"
    node_id: str = ""
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)

    @property
    def public_key(self) -> str:
        raw = self.key.public_key().public_bytes(
            serialization.Encoding.Raw, serialization.PublicFormat.Raw
        )
        return base64.b64encode(raw).decode()

    def enroll_message(self, **changes: Any) -> dict[str, Any]:
        return {
            "join_token": self.join_token,
            "name": self.name,
            "public_key": self.public_key,
            "boot_id": self.boot_id,
            "address": "127.0.0.1",
            "agent_version": "test",
            "inventory": inventory(self.name),
            **changes,
        }

    def enrolled(self) -> NodeClient:
        answer = self.door.post("/v1/enroll", self.enroll_message())
        assert answer.status == 200, answer.json
        self.node_id = answer.json["node_id"]
        return self

    def headers(self, path: str, body: bytes, *, at: str = "") -> dict[str, str]:
        at = at or repr(time.time())
        signature = self.key.sign(wire.signing_input(path, self.node_id, at, body))
        return {
            wire.HEADER_NODE: self.node_id,
            wire.HEADER_TIME: at,
            wire.HEADER_SIGNATURE: base64.b64encode(signature).decode(),
        }

    def post(self, path: str, message: object) -> Answer:
        return self.post_bytes(path, msgspec.json.encode(message))

    def begin(self, path: str, message: object) -> Pending:
        body = msgspec.json.encode(message)
        return self.door.begin("POST", path, body, self.headers(path, body))

    def post_bytes(self, path: str, body: bytes) -> Answer:
        return self.door.request("POST", path, body, self.headers(path, body))

    def beat(self, **changes: Any) -> dict[str, Any]:
        return {"boot_id": self.boot_id, "seq": 1, "at": time.time(), **changes}

    def report(self, **changes: Any) -> dict[str, Any]:
        return {
            "boot_id": self.boot_id,
            "at": time.time(),
            "digest": "d1",
            "agent_version": "test",
            "inventory": inventory(self.name),
            **changes,
        }

    def event(self, **changes: Any) -> dict[str, Any]:
        return {
            "id": new_id("evt"),
            "kind": "kernel_line",
            "at": time.time(),
            "boot_id": self.boot_id,
            "source": "kmsg",
            "raw": "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.",
            **changes,
        }


def enrolment(door: Door, join_token: str, name: str) -> NodeClient:
    return NodeClient(door, name, join_token)


def inventory(name: str) -> dict[str, Any]:
    card = {
        "index": 0,
        "uuid": f"GPU-{name}",
        "serial": f"S-{name}",
        "model": "H100",
        "pci_address": "0000:01:00.0",
        "memory_bytes": 80 * 2**30,
    }
    return {
        "gpus": [card],
        "cpus": 8,
        "memory_bytes": 2**36,
        "kernel": "6.1",
        "driver_version": "550",
        "simulated": True,
    }


class Server:
    """Ingest in a process of its own, on the database of the tests."""

    def __init__(self, app: str = "controlplane.ingest.app:app", **environment: str) -> None:
        self.port = free_port()
        self._app = app
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def door(self) -> Door:
        return Door(self.port)

    def start(self) -> None:
        environment = {**os.environ, "DATABASE_URL": database_url(), **self._environment}
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "granian", "--interface", "asgi", "--workers", "1"),
                *("--port", str(self.port), self._app),
            ],
            env=environment,
            start_new_session=True,
        )
        try:
            wait_until(lambda: self._answers("/healthz"))
        except BaseException:
            self.kill()  # nobody has it yet who would
            raise

    def stop(self) -> None:
        self.terminate()
        try:
            self.wait()
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def terminate(self) -> None:
        assert self._process is not None
        self._process.terminate()

    def wait(self) -> int:
        assert self._process is not None
        return self._process.wait(timeout=120)

    def kill(self) -> None:
        """SIGKILL to the server and its worker, with no chance to finish anything."""
        assert self._process is not None
        os.killpg(self._process.pid, 9)
        self._process.wait(timeout=120)

    def _answers(self, path: str) -> bool:
        try:
            return self.door().request("GET", path).status == 200
        except OSError:
            return False


@contextlib.contextmanager
def speaking_to(app: str, node: NodeClient) -> Iterator[Server]:
    """A server of its own, to which the node speaks."""
    server = Server(app)
    server.start()
    node.door = server.door()
    try:
        yield server
    finally:
        server.stop()


def database_url() -> str:
    """DATABASE_URL with the name of the tests' database."""
    parts = urlsplit(os.environ["DATABASE_URL"])
    return urlunsplit(parts._replace(path="/" + quote(str(connection.settings_dict["NAME"]))))


def wait_until(predicate: Any, timeout: float = 120.0) -> None:
    """Poll until `predicate()` holds; fail after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while not predicate():
        assert time.monotonic() < deadline, f"not within {timeout} s: {predicate}"
        pause.wait(0.02)
