"""Connections that delay, stall, break and end as TCP's do, and requests from peer to peer.

Between two processes nothing is lost or overtaken on one connection: a partition holds it back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tests.runtime.simulation.clock import Clock, Process, Thread

END = b""  # what is read where the other side closed, or died
CONNECT_S = 2.0
REQUEST_S = 5.0


class Unreachable(OSError):
    """No answer came from there."""


class Server(Protocol):
    """Where the coordinator's address leads."""

    process: Process

    def accept(self, connection: Connection) -> None:
        """Somebody connected."""


class Network:
    """Which process reaches which, and how fast."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.server: Server | None = None  # who listens at the coordinator's address
        self.slowest_s = 0.02
        self.lags: dict[str, float] = {}  # by process: how much longer all takes
        self._blocked: set[tuple[str, str]] = set()
        self._connections: list[Connection] = []

    def delay(self, *names: str) -> float:
        """How long a message between these processes takes."""
        delay = self.clock.random.uniform(0.0002, self.slowest_s)
        return delay + sum(self.lags.get(name, 0.0) for name in names) if self.lags else delay

    def block(self, source: str, target: str) -> None:
        self.clock.note("nothing passes from %s to %s", source, target)
        self._blocked.add((source, target))

    def heal(self, source: str, target: str) -> None:
        self.clock.note("all passes from %s to %s", source, target)
        self._blocked.discard((source, target))
        for connection in self._connections:
            for stream in (connection.up, connection.down):
                if (stream.source.name, stream.target.name) == (source, target):
                    stream.flush()

    def passes(self, source: str, target: str) -> bool:
        return (source, target) not in self._blocked

    def both_ways(self, one: str, other: str) -> bool:
        return self.passes(one, other) and self.passes(other, one)

    def connects(self, names: Sequence[str]) -> bool:
        """Each of these reaches each."""
        return not self._blocked or all(self.passes(a, b) for a in names for b in names)

    def connect(self, client: Process, then: Callable[[Connection | None], None]) -> None:
        """Reach for the coordinator; `then` is given the connection, or None."""
        server = self.server
        if server is not None and not self.both_ways(client.name, server.process.name):
            client.after(CONNECT_S, then, then, None)
        elif server is None or not server.process.alive:
            client.after(self.delay(), then, then, None)
        else:
            client.after(self.delay(), then, self._connected, client, server, then)

    def _connected(
        self, client: Process, server: Server, then: Callable[[Connection | None], None]
    ) -> None:
        if not server.process.alive:
            then(None)
            return
        connection = Connection(self, client, server.process)
        self._connections = [c for c in self._connections if not c.over] + [connection]
        server.accept(connection)  # by its kernel: the process may be frozen
        then(connection)

    def cut(self, client: Process) -> None:
        """Break the connection that this process has to the coordinator."""
        for connection in self._connections:
            if connection.client is client:
                connection.reset()

    def died(self, process: Process, *, silently: bool) -> None:
        """Its kernel ends all its connections, unless that died as well."""
        for connection in self._connections:
            if process in (connection.client, connection.server):
                connection.half_dead(process, silently=silently)

    def ask(self, thread: Thread, target: Process, serve: Callable[[], Any], lasts: float) -> Any:
        """In a thread: what `serve` returns over there, after `lasts` seconds of transfer.

        Raises Unreachable.
        """
        source = thread.process
        if not target.alive:
            thread.sleep(self.delay())
            raise Unreachable("nobody listens there")
        answer: list[Any] = []

        def arrive() -> None:
            if self.both_ways(source.name, target.name):
                given = serve()
                source.after(self.delay() / 4 + lasts, thread, finish, given)

        def finish(given: Any) -> None:
            if target.alive and self.both_ways(source.name, target.name):
                answer.append(given)

        target.after(self.delay() / 4, finish, arrive)
        thread.wait(lambda: answer or not target.alive, REQUEST_S)
        if not answer:
            raise Unreachable(f"{target.name} did not answer")
        return answer[0]


class Stream:
    """One direction of a connection."""

    def __init__(
        self, network: Network, source: Process, target: Process, hear: Callable[[bytes], None]
    ) -> None:
        self.network, self.source, self.target = network, source, target
        self.hear = hear  # on the target's side
        self.shut = False  # nothing more is accepted
        self._waiting: deque[bytes] = deque()
        self._last = 0.0  # when the last one arrives
        self._held = 0  # how many could have arrived, if it were not for a partition

    def send(self, data: bytes) -> None:
        if self.shut:
            return
        self.shut = data == END
        clock = self.network.clock
        self._waiting.append(data)
        delay = self.network.delay(self.source.name, self.target.name)
        self._last = max(self._last, clock.now + delay)
        clock.at(self._last - clock.now, self._arrive)

    def lose(self) -> None:
        """What is under way never arrives."""
        self._waiting.clear()
        self._held = 0

    def flush(self) -> None:
        held, self._held = self._held, 0
        for _ in range(held):
            self.network.clock.at(self.network.slowest_s, self._arrive)

    def _arrive(self) -> None:
        if not self._waiting:
            return
        if not self.network.passes(self.source.name, self.target.name):
            self._held += 1
            return
        self.target.after(0.0, self, self.hear, self._waiting.popleft())


class Connection:
    """A replica's connection to the coordinator. Each side sets what it does with what it hears."""

    def __init__(self, network: Network, client: Process, server: Process) -> None:
        self.network, self.client, self.server = network, client, server
        self.on_client: Callable[[bytes], None] = lambda _data: None
        self.on_server: Callable[[bytes], None] = lambda _data: None
        self.up = Stream(network, client, server, lambda data: self.on_server(data))
        self.down = Stream(network, server, client, lambda data: self.on_client(data))

    @property
    def over(self) -> bool:
        return self.up.shut and self.down.shut

    def close_server(self) -> None:
        """What it had still to read is answered by a reset, which may outrun its last words."""
        if not self.down.shut and self.network.clock.random.random() < 0.2:
            self.down.lose()
        self.down.send(END)
        self.up.shut = True
        self.up.lose()

    def close_client(self) -> None:
        self.up.send(END)
        self.down.shut = True
        self.down.lose()

    def reset(self) -> None:
        """Broken on the way: each side hears of it in its own time, and of nothing else."""
        for stream in (self.up, self.down):
            stream.lose()
            stream.send(END)
            stream.shut = True

    def half_dead(self, process: Process, *, silently: bool) -> None:
        ours, theirs = (self.up, self.down) if process is self.client else (self.down, self.up)
        theirs.shut = True
        if silently:
            ours.lose()
            ours.shut = True
        else:
            ours.send(END)
