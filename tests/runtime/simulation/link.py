"""The real Link on a simulated connection: its thread's loop is mirrored here, the rest runs as is.

Nothing but `Link._run`, `Link._talk` and the two calls that wait may be written anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from runtime.replica.link import RETRY_S, SILENT_S, WORD_S, Link
from tests.runtime.simulation.clock import Process, Thread
from tests.runtime.simulation.network import END, Connection, Network


class SimulatedLink(Link):
    """Reconnects for as long as its process lives."""

    def __init__(
        self,
        network: Network,
        process: Process,
        introduce: Callable[[], list[dict[str, Any]]],
        on_break: Callable[[int, dict[str, Any]], None],
    ) -> None:
        super().__init__("coordinator:1", introduce, on_break)
        self.network = network
        self.process = process
        self.waiter: Thread | None = None  # who may wait in our calls
        self._heard_at = 0.0

    @property
    def connected(self) -> bool:
        return self._socket is not None

    def say(self, op: str, **message: Any) -> bool:
        if op not in ("pong", "set", "get"):
            told = message if self.connected else "to nobody"
            self.process.clock.note("%s says %s %s", self.process.name, op, told)
        return super().say(op, **message)

    def start(self) -> None:
        self.network.connect(self.process, self._connected)

    def get(self, epoch: int, key: str, timeout_s: float) -> str:
        value = self.ask(epoch, key)
        if not self.process.current().wait(value.done, timeout_s):
            raise TimeoutError(key)
        return value.result()

    def await_word(self, limit_s: float) -> None:
        waiter = self.waiter
        assert waiter is not None
        waiter.wait(lambda: self.silent_s() <= limit_s or not self.inbox.empty(), WORD_S)

    def close(self, *, goodbye: bool) -> None:
        self._closing.set()
        if goodbye:
            self.say("goodbye")
        if isinstance(self._socket, _Socket):
            self._socket.connection.close_client()

    def _connected(self, connection: Connection | None) -> None:
        clock = self.process.clock
        if connection is None:
            self._again(RETRY_S * (1 + clock.random.random()))
            return
        connection.on_client = lambda data: self._read(connection, data)
        self._heard_at = clock.now
        self._answered = {0: clock.now}
        for message in self.introduce():
            connection.up.send(json.dumps(message).encode())
        clock.note("%s joins as of epoch %s", self.process.name, self.introduce()[0]["epoch"])
        self._socket = _Socket(connection)  # type: ignore[assignment]  # it has what say() needs
        self._watch(connection)

    def _read(self, connection: Connection, data: bytes) -> None:
        if not self._is(connection):
            return
        self._heard_at = self.process.clock.now
        if data == END:
            self._lost(connection)
            return
        message = json.loads(data)
        if message.get("op") not in ("ping", "value"):
            self.process.clock.note("%s hears %s", self.process.name, message)
        self._hear(message)

    def _watch(self, connection: Connection) -> None:
        """Give up a connection on which nothing was heard for long."""
        if not self._is(connection):
            return
        left = self._heard_at + SILENT_S - self.process.clock.now
        if left <= 0:
            self._lost(connection)
        else:
            self.process.after(left + 0.001, connection.down, self._watch, connection)

    def _lost(self, connection: Connection) -> None:
        connection.close_client()
        self._socket = None
        self.abandon_calls()
        self._again(RETRY_S * self.process.clock.random.random())

    def _again(self, delay: float) -> None:
        if not self._closing.is_set():
            self.process.after(delay, self, self.start)

    def _is(self, connection: Connection) -> bool:
        return isinstance(self._socket, _Socket) and self._socket.connection is connection


class _Socket:
    """What Link writes to."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def sendall(self, data: bytes) -> None:
        self.connection.up.send(data)

    def close(self) -> None:
        self.connection.close_client()
