"""The ranks of one replica: the first leads the others, and alone speaks to the coordinator.

Standard library only. What drops is the replica: to the coordinator it is one, and alive while all
of its ranks are. Whoever loses the leader, or is lost by it, ends.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import json
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from runtime.forking import keep_from_children
from runtime.replica.link import Link, keep_alive
from runtime.replica.shape import difference
from runtime.serving import hang_up

log = logging.getLogger("drydock.replica")

FIRST_LINE_S = 5.0  # how long a stranger may take to show the token
MAX_STRANGERS = 16  # that have not shown it yet, beside our ranks; each has a thread
PAUSE_S = 0.1  # before the next is let in, where one could not be
MEET_S = 60.0  # how long the ranks of a replica may take to find each other
LEAVE_S = 40.0  # how long they may take to write what they have to and to leave
MAX_LINE = 1 << 20
NEXT = "-"  # between the digests of the parts of a state


class Incomplete(RuntimeError):
    """A rank of this replica is not there, so that the replica can do nothing."""


@dataclass(eq=False)
class Sibling:
    """One other rank, as the leader sees it."""

    rank: int
    address: str  # its snapshot server
    gloo: str  # where its group listens
    holder: dict[str, str]  # of its node; see `checkpoint.peer.Place`
    connection: socket.socket
    answers: queue.SimpleQueue[dict[str, Any]] = field(default_factory=queue.SimpleQueue)
    answered: int = 0  # number of the last ping that it answered
    leaving: bool = False  # it said goodbye
    writing: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, **message: Any) -> None:
        with self.writing, contextlib.suppress(OSError):  # its reader notices that it is gone
            self.connection.sendall(json.dumps(message).encode() + b"\n")


class Siblings:
    """The leader's lines to the others; of a replica of one rank there are none."""

    def __init__(
        self,
        host: str,
        token: str,
        ranks: int,
        link: Link,
        on_say: Callable[[int, dict[str, Any]], None],
        on_lost: Callable[[int], None],
        shape: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`on_say`: hears, by the rank, what none of the verbs here explains. `on_lost`: a rank is
        gone without a goodbye. Both are called on threads of their own. `shape`: see
        `shape.of_ranks`."""
        self.ranks = ranks
        self._shape = shape
        self.address = ""
        self._token = token.encode()
        self._link = link  # to the coordinator
        #: hears, before anybody reads it, the answer of a rank on which an order failed, on a
        #: thread of its own
        self.on_failed: Callable[[dict[str, Any]], None] = lambda _answer: None
        self._on_say = on_say
        self._on_lost = on_lost
        self._strangers: dict[socket.socket, None] = {}  # whoever came first is the first
        self._there: dict[int, Sibling] = {}
        self._misfit = ""  # of a rank that was refused, and in which way it is not as we are
        self._met = False  # all were there once, and nobody else is to come
        self._gone: set[int] = set()  # who has hung up since
        self._changed = threading.Condition()
        self._pings: dict[int, int] = {}  # ours that not all have answered -> the coordinator's
        self._pinged = 0  # number of our last one
        if ranks > 1:
            self._server = socket.create_server((host, 0), backlog=ranks)
            keep_from_children(self._server)
            self.address = f"{host}:{self._server.getsockname()[1]}"
            threading.Thread(target=self._accept, name="drydock-siblings", daemon=True).start()
            link.on_ping = self._ping
            link.on_connect = self._roll_call

    def meet(self) -> list[Sibling]:
        """All others, in order. Raises Incomplete if one does not come, or is not as we are."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._misfit or len(self._there) == self.ranks - 1, MEET_S
            )
            missing = sorted(set(range(1, self.ranks)) - set(self._there))
            self._met = not missing
        if missing and self._misfit:
            raise Incomplete(self._misfit)
        if missing:
            raise Incomplete(
                f"ranks {missing} of this replica of {self.ranks} did not come within "
                f"{MEET_S:.0f} s; start all of them"
            )
        if self.ranks > 1:
            with contextlib.suppress(OSError):  # whoever accepts has just closed it
                self._server.shutdown(socket.SHUT_RDWR)  # which wakes it
        return [self._there[rank] for rank in sorted(self._there)]

    def tell(self, op: str, **message: Any) -> None:
        """Tell all; may be called from any thread."""
        for sibling in self._there.values():
            sibling.tell(op=op, **message)

    def answers(self) -> list[dict[str, Any]]:
        """What each answers to the last order, by rank. Raises Incomplete if one has left."""
        found = []
        for rank in sorted(self._there):
            answer = self._there[rank].answers.get()
            if not answer:
                raise Incomplete(f"rank {rank} of this replica has left the loop; the others go on")
            found.append(answer)
        return found

    def await_leave(self) -> None:
        """Wait until all have hung up, for LEAVE_S at most."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._gone) == len(self._there), LEAVE_S)

    def close(self) -> None:
        """Hang up: without a goodbye the others end too."""
        for sibling in list(self._there.values()):
            with contextlib.suppress(OSError):  # it hung up first
                sibling.connection.shutdown(socket.SHUT_RDWR)

    # --- each in a thread of its own ------------------------------------------------------------

    def _accept(self) -> None:
        with self._server:
            while not self._met:
                try:
                    connection, _address = self._server.accept()
                    self._let_in(connection)
                except (OSError, RuntimeError) as error:  # no descriptor or no thread is free now
                    if not self._met:
                        log.warning("not_let_in error=%r", error)
                        time.sleep(PAUSE_S)

    def _let_in(self, connection: socket.socket) -> None:
        """Hear who it is. If too many have not said so yet, the one that has had most time goes.
        Raises RuntimeError."""
        keep_from_children(connection)
        with self._changed:
            self._strangers[connection] = None
            crowded = len(self._strangers) > self.ranks + MAX_STRANGERS
            first = next(iter(self._strangers))
        if crowded:
            self._hang_up(first)
        # For all of its first line: each byte of it may come in time.
        late = threading.Timer(FIRST_LINE_S, self._hang_up, [connection])
        late.daemon = True
        try:
            late.start()
            threading.Thread(
                target=self._serve, args=(connection, late), name="drydock-sibling", daemon=True
            ).start()
        except RuntimeError:
            late.cancel()
            self._hang_up(connection)
            connection.close()
            raise

    def _hang_up(self, connection: socket.socket) -> None:
        """On whoever is still a stranger."""
        with self._changed:
            if connection not in self._strangers:
                return
            del self._strangers[connection]
        hang_up(connection)

    def _serve(self, connection: socket.socket, late: threading.Timer) -> None:
        sibling = None
        try:
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            lines = connection.makefile("rb")
            sibling = self._admit(connection, json.loads(lines.readline(MAX_LINE)))
            late.cancel()
            keep_alive(connection)
            while sibling is not None and (line := lines.readline(MAX_LINE)):
                self._hear(sibling, json.loads(line))
        except (OSError, ValueError, KeyError) as error:
            log.warning("sibling_failed error=%r", error)
        finally:
            late.cancel()
            self._hang_up(connection)
            hang_up(connection)  # closed alone it stays open for as long as anything has `lines`
            connection.close()
            if sibling is not None:
                sibling.answers.put({})
                self._forget(sibling)

    def _admit(self, connection: socket.socket, first: dict[str, Any]) -> Sibling | None:
        stranger = self._refusal(first)
        misfit = "" if stranger else self._unlike(first)
        if refusal := stranger or misfit:
            log.warning("sibling_refused error=%s", refusal)
            connection.sendall(json.dumps({"op": "refused", "error": refusal}).encode() + b"\n")
            if misfit:
                self._refuse_to_meet(int(first["rank"]), misfit)
            return None
        rank = int(first["rank"])
        sibling = Sibling(
            rank, str(first["address"]), str(first["gloo"]), dict(first["holder"]), connection
        )
        with self._changed:
            del self._strangers[connection]  # a KeyError if we have just hung up on it
            self._there[rank] = sibling
            self._changed.notify_all()
        return sibling

    def _refusal(self, first: dict[str, Any]) -> str:
        if not hmac.compare_digest(str(first.get("token", "")).encode(), self._token):
            return "wrong token: give all ranks of a replica the job's DRYDOCK_TOKEN"
        rank = int(first["rank"])
        if not 0 < rank < self.ranks or rank in self._there:
            return f"this replica has {self.ranks} ranks, and no place for a rank {rank}"
        return ""

    def _unlike(self, first: dict[str, Any]) -> str:
        """In which way one of our ranks would train otherwise than we do, with the remedy; "" if in
        none."""
        whose = "that of the first rank of its replica"
        return difference(first.get("shape", {}), self._shape, whose, "rank")

    def _refuse_to_meet(self, rank: int, misfit: str) -> None:
        """Nobody else comes as this rank: whoever waits for it hears why."""
        with self._changed:
            self._misfit = f"rank {rank} of this replica was refused: {misfit}"
            self._changed.notify_all()

    def _forget(self, sibling: Sibling) -> None:
        """It hung up."""
        with self._changed:
            if self._met:
                self._gone.add(sibling.rank)
            else:
                del self._there[sibling.rank]
            self._changed.notify_all()
        if not sibling.leaving:
            self._on_lost(sibling.rank)

    def _hear(self, sibling: Sibling, message: dict[str, Any]) -> None:
        op = message.pop("op")
        if op == "answer":
            if "failed" in message:
                self.on_failed(message)
            sibling.answers.put(message)
        elif op == "pong":
            self._pong(sibling, int(message["n"]))
        elif op == "set":
            self._link.set(int(message["epoch"]), str(message["key"]), str(message["value"]))
        elif op == "get":
            value = self._link.ask(int(message["epoch"]), str(message["key"]))
            value.add_done_callback(functools.partial(_pass_on, sibling, int(message["id"])))
        elif op == "goodbye":
            sibling.leaving = True
        else:
            self._on_say(sibling.rank, {"op": op, **message})

    def _roll_call(self) -> None:
        """Wait until all ranks answer: before that the replica cannot speak for itself."""
        number = self._ping(0)
        with self._changed:
            self._changed.wait_for(
                lambda: all(one.answered >= number for one in self._there.values())
            )

    def _ping(self, number: int) -> int:
        """The coordinator asks whether the replica is there: whether all its ranks are. Returns
        the number of the ping to them."""
        with self._changed:
            self._pinged += 1  # the coordinator counts anew on each connection
            self._pings[self._pinged] = number
            mine = self._pinged
        for sibling in self._there.values():
            sibling.tell(op="ping", n=mine, heard=sibling.answered)
        return mine

    def _pong(self, sibling: Sibling, number: int) -> None:
        with self._changed:
            sibling.answered = number
            common = min(one.answered for one in self._there.values())
            due = [self._pings.pop(n) for n in sorted(self._pings) if n <= common]
            self._changed.notify_all()
        for asked in [number for number in due if number][-1:]:
            self._link.pong(asked)


def _pass_on(sibling: Sibling, number: int, value: Future[str]) -> None:
    if value.exception() is None:
        sibling.tell(op="value", id=number, value=value.result())
    else:
        sibling.tell(op="value", id=number, error=str(value.exception()))
