"""One contender's job on this machine: its replicas started, listened to, struck.

One thread reads what all replicas tell; it judges nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.rivals.contenders import Contender, spawn, start_helpers
from benchmarks.rivals.figures import Event
from benchmarks.rivals.task import FOR_EVER, KILL, Fault, Model, Task

PEER = struct.Struct("3i")  # of a connection: process, user, group


class Nursery:
    """Forks the replicas of all jobs of a kind; see nursery.py."""

    def __init__(self, contender: Contender, log: Path) -> None:
        words = [contender.python, "-m", "benchmarks.rivals.nursery", contender.worker]
        self.process = spawn(words, log, {}, talks=True)
        self.log = log

    def start(self, task: Task, environment: dict[str, str]) -> int:
        """The process id of a new replica. Raises RuntimeError if the nursery has ended."""
        pipes = self.process.stdin, self.process.stdout
        order = json.dumps({"task": asdict(task), "environment": environment})
        with contextlib.suppress(BrokenPipeError):  # then it has no answer either
            pipes[0].write(order.encode() + b"\n")  # type: ignore[union-attr]
            pipes[0].flush()  # type: ignore[union-attr]
        answer = pipes[1].readline()  # type: ignore[union-attr]
        if not answer:
            raise RuntimeError(f"the nursery has ended; see {self.log}")
        return int(answer)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass(eq=False)
class Member:
    """One start of one replica, and what it told."""

    replica: int
    pid: int
    started: float  # monotonic
    killed: bool = False
    ended: bool = False
    events: list[Event] = field(default_factory=list)
    connection: socket.socket | None = None
    rest: bytes = b""

    def commits(self, since: float = 0.0) -> list[Event]:
        return [e for e in self.events if e.what == "commit" and e.at > since]

    @property
    def last_words(self) -> str:
        return next((str(e.data["error"]) for e in self.events if e.what == "failed"), "no word")


class Job:
    """The replicas of one contender, and what they need."""

    def __init__(
        self,
        contender: Contender,
        nursery: Nursery,
        model: Model,
        replicas: int,
        folder: Path,
        until: int = FOR_EVER,
    ) -> None:
        self.contender = contender
        self.nursery = nursery
        self.model = model
        self.replicas = replicas
        self.folder = folder
        self.until = until
        self.members: dict[int, Member] = {}  # the present ones
        self._all: list[Member] = []
        self._selector = selectors.DefaultSelector()
        self._listening = socket.socket(socket.AF_UNIX)

    def __enter__(self) -> Self:
        self.folder.mkdir()
        self._listening.bind(str(self.folder / "events"))
        self._listening.listen()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._helpers = start_helpers(self.contender, self.folder, self.replicas)
        for replica in range(self.replicas):
            self.start(replica)
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        for member in self._all:
            self.strike(member, KILL)
        self._helpers.end()
        self._listening.close()
        self._selector.close()

    def start(self, replica: int) -> Member:
        """Start a replica anew."""
        task = Task(
            replica=replica,
            replicas=self.replicas,
            model=self.model,
            events=str(self.folder / "events"),
            folder=str(self.folder),
            until=self.until,
        )
        own = {"DRYDOCK_REPLICA": str(replica)}
        pid = self.nursery.start(task, {**self._helpers.environment, **own})
        member = Member(replica, pid, time.monotonic())
        self.members[replica] = member
        self._all.append(member)
        return member

    def strike(self, member: Member, fault: Fault) -> None:
        """What it told before is still heard."""
        member.killed = fault is KILL
        if not member.ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, fault.signal)

    def let(self, until: int) -> None:
        """Let all replicas train the steps before this one."""
        self.until = until
        for member in self.members.values():
            if member.connection is not None and not member.ended:
                member.connection.sendall(f"{until}\n".encode())

    def wait(self, happened: Callable[[], bool], patience_s: float) -> bool:
        """Listen until it happened; False if it has not within so many seconds."""
        deadline = time.monotonic() + patience_s
        while not happened():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._listen(left)
        return True

    def _listen(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listening:
                self._accept()
            else:
                self._read(key.data)

    def _accept(self) -> None:
        """A connection tells by its process whose it is."""
        connection, _ = self._listening.accept()
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
        pid, _, _ = PEER.unpack(peer)
        member = next(member for member in reversed(self._all) if member.pid == pid)
        member.connection = connection
        self._selector.register(connection, selectors.EVENT_READ, member)

    def _read(self, member: Member) -> None:
        connection = member.connection
        assert connection is not None, "it is registered with its connection"  # noqa: S101
        try:
            given = connection.recv(1 << 16)
        except ConnectionResetError:
            given = b""
        if not given:
            member.ended = True
            self._selector.unregister(connection)
            connection.close()
            return
        *lines, member.rest = (member.rest + given).split(b"\n")
        member.events += [Event(**json.loads(line)) for line in lines]
