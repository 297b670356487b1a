"""A member's one connection to the coordinator: a thread that reads, answers and reconnects.

Imports no torch. The training thread never waits for it on a healthy step; what the coordinator
says is put into `inbox`, except a broken epoch, which is acted upon at once through `on_break`, and
what the first rank of a replica says of a read.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from runtime.forking import keep_from_children
from runtime.replica.network import address_of

log = logging.getLogger("drydock.link")

CONNECT_S = 2.0
SILENT_S = 8.0  # a coordinator that said nothing for so long is looked for anew
RETRY_S = 0.1
REACH_S = 60.0  # how long whom nobody else may replace is tried to be reached
#: Who reaches nobody says so after the first, and again after each of the second, in seconds.
AWAY_S, STILL_AWAY_S = 10.0, 60.0
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 5}  # seconds, and how often
UNACKNOWLEDGED_MS = 15_000
#: Not the script's generator: what it draws must not depend on when the coordinator is away.
_jitter = random.Random()  # noqa: S311
SHUN_S = 1.0  # after an answer that is not our coordinator's, before we ask there again
WORD_S = 0.5  # how long a wait for a word may take before other wishes are looked at


class Refused(RuntimeError):
    """The coordinator refuses us for good: a wrong token, or another start has our place."""


class Strange(ConnectionError):
    """Whoever answers there is not our coordinator, or was started as another job's."""


class LinkLost(ConnectionError):
    """The coordinator cannot be reached at the moment; the link keeps trying."""


class Link:
    """Says first, and again after each reconnect, what `introduce` returns at that time."""

    def __init__(
        self,
        address: str,
        introduce: Callable[[], list[dict[str, Any]]],
        on_break: Callable[[int, dict[str, Any]], None],
        *,
        on_end: Callable[[], None] | None = None,
        silent_s: float | None = SILENT_S,
    ) -> None:
        """`on_end`: called when the first connection has ended or cannot be made, where none is to
        follow it. `silent_s`: one on which nothing was said for so long has ended; None for never.

        Raises ValueError if the address is none.
        """
        self.target = address_of(address)
        self.introduce = introduce
        self.on_break = on_break
        #: answers a ping by its number, at once or later
        self.on_ping: Callable[[int], object] = self.pong
        #: called before each connection: may wait until we can speak for ourselves
        self.on_connect: Callable[[], None] = lambda: None
        #: whether we train: then only whoever knows that another has our place ends us
        self.trains: Callable[[], bool] = lambda: False
        #: told, as that comes, that what the read of this number gets is of no use any more
        self.on_give_up: Callable[[int], object] = lambda _number: None
        #: told why whoever answers there is not taken for our coordinator, once
        self.on_strange: Callable[[str], object] = lambda _why: None
        self._strange = ""
        self._on_end = on_end
        self._silent_s = silent_s
        self.inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.step = -1
        #: see `_now`: the coordinator knows that we were there at this time
        self.confirmed = _now()
        self._answered: dict[int, float] = {}  # number of a ping -> when we answered
        self._word = threading.Condition()  # something was heard
        self._socket: socket.socket | None = None
        #: whether anything was, on this connection: who waits for its place hears nothing
        self.heard = False
        self._write_lock = threading.Lock()
        #: what an epoch's rendezvous was given, by its key: a coordinator that ended has forgotten
        self._set: tuple[int, dict[str, str]] = (0, {})
        self._calls: dict[int, Future[str]] = {}
        self._calls_lock = threading.Lock()
        self._next_call = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="drydock-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def say(self, op: str, **message: Any) -> bool:
        """Send a message, or drop it if the link is down: `join` and `report` are repeated.

        Returns whether it was sent, which does not mean that it arrived.
        """
        data = json.dumps({"op": op, **message}).encode() + b"\n"
        with self._write_lock:
            if self._socket is None:
                return False
            try:
                self._socket.sendall(data)
            except OSError:
                self._socket.close()
                self._socket = None
                return False
        return True

    def set(self, epoch: int, key: str, value: str) -> None:
        """Leave word for the others of this epoch, also where the coordinator is started anew."""
        with self._calls_lock:
            words = self._set[1] if self._set[0] == epoch else {}
            self._set = (epoch, {**words, key: value})
        self.say("set", epoch=epoch, key=key, value=value)

    def get(self, epoch: int, key: str, timeout_s: float) -> str:
        """Wait for a value of this epoch's rendezvous.

        Raises LinkLost if the coordinator goes away or the epoch breaks meanwhile.
        """
        value = self.ask(epoch, key)
        try:
            return value.result(timeout_s)
        except TimeoutError:
            self._forget(value)
            raise

    def ask(self, epoch: int, key: str) -> Future[str]:
        """The same, for later: what it raises is in what is returned."""
        future: Future[str] = Future()
        with self._calls_lock:
            self._next_call += 1
            number = self._next_call
            self._calls[number] = future
        if not self.say("get", epoch=epoch, key=key, id=number):
            self._settle(number, LinkLost("the coordinator is away"))
        return future

    def _forget(self, value: Future[str]) -> None:
        with self._calls_lock:
            self._calls = {n: one for n, one in self._calls.items() if one is not value}

    def silent_s(self) -> float:
        """For how long the coordinator may not have heard of us, in seconds."""
        return _now() - self.confirmed

    def await_word(self, limit_s: float) -> None:
        """Wait for a while, or until it has again within `limit_s`, or something is to be heard."""
        with self._word:
            self._word.wait_for(
                lambda: self.silent_s() <= limit_s or not self.inbox.empty(), WORD_S
            )

    def abandon_calls(self) -> None:
        """Wake whoever waits in `get`."""
        with self._calls_lock:
            numbers = list(self._calls)
        for number in numbers:
            self._settle(number, LinkLost("the epoch broke or the coordinator went away"))

    def pong(self, number: int) -> None:
        """Answer the ping of this number; may be called on any thread."""
        with self._calls_lock:
            self._answered[number] = _now()
        self.say("pong", n=number, step=self.step)

    def close(self, *, goodbye: bool) -> None:
        """Hang up; with a goodbye nobody takes our end for a death."""
        self._closing.set()
        if goodbye:
            self.say("goodbye")
        with self._write_lock:
            if self._socket is not None:
                with contextlib.suppress(OSError):  # it hung up first
                    self._socket.shutdown(socket.SHUT_WR)
        if self._thread.is_alive():
            self._thread.join(2.0)

    def _run(self) -> None:
        away = time.monotonic()  # since when nothing was reached
        tell_at = away + AWAY_S
        while not self._closing.is_set():
            self.on_connect()
            try:
                connection = socket.create_connection(self.target, timeout=CONNECT_S)
            except OSError as error:
                now = time.monotonic()
                if self._on_end is not None:
                    if now - away > REACH_S:
                        self._on_end()
                        return
                elif now >= tell_at:
                    tell_at = now + STILL_AWAY_S
                    log.warning(
                        "out_of_reach address=%s:%s for_s=%.0f error=%s: is this the address of "
                        "the job's coordinator (DRYDOCK_COORDINATOR), and does it run?",
                        *self.target,
                        now - away,
                        error,
                    )
                self._closing.wait(RETRY_S * (1 + _jitter.random()))
                continue
            try:
                self._talk(connection)
            except Strange as error:
                self._shun(str(error))
            except OSError:
                pass  # a lost coordinator costs no step: connect again
            except Exception as error:  # whatever it is, the training loop must hear of it
                log.exception("link_failed")
                self._give_up({"op": "refused", "error": f"the link failed: {error!r}"})
            finally:
                with self._write_lock:
                    self._socket = None
                connection.close()
                self.abandon_calls()
            if self._on_end is not None:
                self._on_end()
                return
            away = time.monotonic()
            tell_at = away + AWAY_S
            self._closing.wait(RETRY_S * _jitter.random())

    def _talk(self, connection: socket.socket) -> None:
        keep_from_children(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._silent_s is None:
            keep_alive(connection)
        connection.settimeout(self._silent_s)
        self._answered = {0: _now()}
        with self._write_lock:
            if self._closing.is_set():
                return  # there was nobody to say goodbye to: nobody is to think that we come
            self.heard = False
            for message in [*self.introduce(), *self._said_before()]:
                connection.sendall(json.dumps(message).encode() + b"\n")
            self._socket = connection
        pending = b""
        while data := connection.recv(1 << 16):
            self.heard = True
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                self._hear(self._parsed(line))
            with self._word:
                self._word.notify_all()

    def _said_before(self) -> list[dict[str, Any]]:
        with self._calls_lock:
            epoch, words = self._set
        return [{"op": "set", "epoch": epoch, "key": k, "value": v} for k, v in words.items()]

    def _parsed(self, line: bytes) -> dict[str, Any]:
        """Raises Strange if we train and it is none of a coordinator's to a member, else
        ValueError if it is no JSON."""
        if not self.trains():
            found: dict[str, Any] = json.loads(line)
            return found
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise Strange(f"it says {line!r:.100}, which no coordinator does")
        if "op" not in message and not message.get("must_end"):
            raise Strange(str(message.get("error", message)))
        return message

    def _shun(self, why: str) -> None:
        """It costs no step either; our lease ends, if it stays so."""
        log.warning("strange_coordinator address=%s:%s error=%s", *self.target, why)
        if why != self._strange:
            self._strange = why
            self.on_strange(f"at {self.target[0]}:{self.target[1]} instead of it: {why}")
        self._closing.wait(SHUN_S)

    def _hear(self, message: dict[str, Any]) -> None:
        op = message.get("op", "refused")
        if op == "ping":
            self._strange = ""
            self._note(int(message["heard"]))
            self.on_ping(int(message["n"]))
            return
        if op == "value":
            failed = "error" in message
            value = LinkLost(message["error"]) if failed else str(message["value"])
            self._settle(int(message["id"]), value)
            return
        if op == "give_up":
            self.on_give_up(int(message["number"]))
            return
        if op in ("lost", "broken", "evicted"):
            self.on_break(int(message["epoch"]), message)
            self.abandon_calls()
        if op == "refused":
            self._give_up({**message, "op": op})
        else:
            self.inbox.put(message)

    def _note(self, heard: int) -> None:
        """The coordinator says which answer of ours reached it."""
        with self._calls_lock:
            self.confirmed = self._answered.get(heard, self.confirmed)
            self._answered = {n: at for n, at in self._answered.items() if n >= heard}

    def _settle(self, number: int, value: str | LinkLost) -> None:
        """Answer a call, unless it was answered."""
        with self._calls_lock:
            future = self._calls.pop(number, None)
        if future is None:
            return
        if isinstance(value, LinkLost):
            future.set_exception(value)
        else:
            future.set_result(value)

    def _give_up(self, message: dict[str, Any]) -> None:
        """Nothing more will come: no epoch of ours, present or future, can be trusted."""
        log.error("refused by=%s error=%s", self.target, message.get("error"))
        self._closing.set()
        try:
            self.on_break(sys.maxsize, message)
        finally:  # whatever that meets, whoever waits for us is to hear of it
            self.abandon_calls()
            self.inbox.put(message)


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel find out if the other machine is gone; a process that only sleeps is not."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)


def _now() -> float:
    """Seconds, those included for which this machine slept: the others went on meanwhile."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
