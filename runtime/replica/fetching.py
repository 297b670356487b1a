"""State taken over from peers: a copy from several at once, then their steps one by one.

What arrived survives a lost connection. Nothing is believed before its hash was compared.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from runtime.framing import Busy, PeerFailed, receive_chunk, receive_json
from runtime.image import CHUNK_BYTES, Damaged, Staged, pages
from runtime.priority import lower_priority
from runtime.replica.buffers import BufferPool
from runtime.replica.peers import Reduced
from runtime.serving import IDLE_S, Requests
from runtime.snapshot import bytes_of

log = logging.getLogger("drydock.peers")

WAIT_S = 0.5  # how long a peer may wait for the next step to be made before it says that it was not
REST_S = 0.5  # so long nothing may come of a step that somebody waits for
PIECE = 8  # chunks asked for at once
#: For so long those who serve too many are asked again, so often.
BUSY_S, ASK_AGAIN_S = 10.0, 0.5
LOOK_S = 0.05  # so often whoever fetches a step looks whether it is still wanted
TRIES = 3  # connections to one peer, for one state


class NotKept(PeerFailed):
    """The peer keeps this step no longer, or never made it."""


class NotYet(PeerFailed):
    """The peer has not made this step yet."""


class Connection(Requests):
    """To one peer."""

    receiving = False  # a step's bytes, at this moment
    received = 0  # chunks of such
    _last = 0.0  # monotonic: when something was asked for

    def ask(self, **message: Any) -> socket.socket:
        """See `Requests.ask`. On a connection that rested the peer may have hung up by now."""
        now = time.monotonic()
        if now - self._last > IDLE_S / 2:
            self.close()
        self._last = now
        return super().ask(**message)

    def manifest(self, step: int) -> dict[str, Any]:
        """The description of the copy that the peer holds. Raises PeerFailed."""
        return receive_json(self.ask(op="manifest", step=step))

    def reduced(
        self,
        step: int,
        wait_s: float = 0.0,
        *,
        settled: bool = False,
        have: Reduced | None = None,
        pool: BufferPool | None = None,
    ) -> Reduced:
        """One committed step; `settled`, only if the peer made another on it. `have`: the same
        step, fetched before; it is returned if it is the one that the peer made. `pool`: for its
        buffer, which goes back there once nobody holds the step.

        Raises NotKept, NotYet, PeerFailed, Damaged, MemoryError.
        """
        known = None if have is None else have.epoch
        connection = self.ask(op="reduced", step=step, wait_s=wait_s, settled=settled, have=known)
        described = receive_json(connection)
        if "newest" in described:
            kind = NotYet if described["yet"] else NotKept
            raise kind(f"step {step}: {self.address} made {described['newest']} last")
        if have is not None and "same" in described:
            return have
        size = int(described["bytes"]) // 4
        try:
            buffer = torch.empty(size) if pool is None else pool.take(size)
        except RuntimeError as error:  # torch's, of a card's memory too
            raise _no_memory(4 * size, f"step {step}", error) from error
        view = bytes_of(buffer)
        self.receiving = True
        try:
            for start in range(0, len(view), CHUNK_BYTES):
                receive_chunk(connection, view[start : start + CHUNK_BYTES])
                self.received += 1
        finally:
            self.receiving = False
        reduced = Reduced(int(described["step"]), int(described["epoch"]), buffer)
        if pool is not None:
            pool.lend(buffer, reduced)
        return reduced


def fetch_state(donors: Sequence[str], token: str, step: int, digest: str) -> Staged:
    """The state that all donors hold a copy of, a part from each.

    Raises PeerFailed if they cannot give it whole, Damaged if the whole is not what was announced,
    and MemoryError if there is no memory for it.
    """
    began = time.monotonic()
    manifest = _manifest(donors, token, step, digest)
    size = int(manifest["bytes"])
    try:
        # The kernel gives large pages in jerks, which whoever trains on this machine feels.
        memory = pages(size, large=False)
    except OSError as error:
        raise _no_memory(size, f"the state of step {step}", error) from error
    download = Download(manifest, memory)
    threads = [
        threading.Thread(target=download.draw, args=(donor, token), name="drydock-fetch")
        for donor in donors
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    staged = download.whole()
    took_s, gave = time.monotonic() - began, json.dumps(download.sources)
    log.info("state_fetched step=%s took_s=%.2f chunks=%s", step, took_s, gave)
    return staged


def fetch_reduced(
    donors: Iterable[str],
    token: str,
    step: int,
    have: Reduced | None = None,
    pool: BufferPool | None = None,
    broken: Callable[[], bool] = lambda: False,
) -> Reduced:
    """One committed step, from the first donor that has it; `have`, `pool`: see
    `Connection.reduced`. Donors that serve too many are asked again: of a large job most may be
    behind one. Raises PeerFailed with all answers, soon after what it is wanted for is `broken`;
    MemoryError."""
    asked, pause = list(donors), threading.Event()
    until = time.monotonic() + BUSY_S
    answers: dict[str, Exception] = {}
    while True:
        for donor in asked:
            if broken():
                break
            connection = Connection(donor, token)
            try:
                with _hanging_up(connection, broken):
                    return connection.reduced(step, have=have, pool=pool)
            except (PeerFailed, Damaged) as error:
                answers[donor] = error
            finally:
                connection.close()
        busy = any(isinstance(error, Busy) for error in answers.values())
        if not busy or broken() or time.monotonic() > until:
            told = [f"{donor}: {error}" for donor, error in answers.items()]
            raise PeerFailed(f"no peer could hand over step {step}: {told}")
        asked = [one for one, error in answers.items() if isinstance(error, Busy | NotYet)]
        pause.wait(ASK_AGAIN_S)


@contextlib.contextmanager
def _hanging_up(connection: Connection, broken: Callable[[], bool]) -> Iterator[None]:
    """Whoever waits within for what the connection may never give hears so once it is `broken`."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_S):
            if broken():
                connection.hang_up()

    with contextlib.suppress(RuntimeError):  # no more threads: then it waits for the donor's limit
        threading.Thread(target=watch, name="drydock-fetch", daemon=True).start()
    try:
        yield
    finally:
        over.set()


@dataclass
class Piece:
    """Consecutive chunks that one peer was asked for and that have not arrived."""

    first: int
    count: int


class Download:
    """One state on its way: which chunks are missing, and who was asked for which."""

    def __init__(self, manifest: dict[str, Any], buffer: memoryview) -> None:
        """Fills `buffer`, which has as many bytes as the state."""
        self.manifest = manifest
        self.buffer = buffer
        self.sources: Counter[str] = Counter()  # address -> chunks that it gave
        self._hashes: tuple[str, ...] = tuple(manifest["chunks"])
        total = len(self._hashes)
        self._missing = deque(Piece(p, min(PIECE, total - p)) for p in range(0, total, PIECE))
        self._asked = 0  # pieces that some connection is reading
        self._changed = threading.Condition()
        self._answers: list[str] = []

    def draw(self, donor: str, token: str) -> None:
        """Take pieces from this donor until nothing is missing, or it fails too often."""
        lower_priority()  # other replicas may train on this machine, at the one that is ours too
        connection = Connection(donor, token)
        tries = TRIES
        while tries and (piece := self._next()):
            try:
                self._read(connection, piece)
            except PeerFailed as error:
                log.warning("peer_failed peer=%s left=%s error=%s", donor, tries - 1, error)
                self._answers.append(f"{donor}: {error}")
                connection.close()
                tries -= 1
            except Damaged as error:
                log.error("peer_damaged peer=%s error=%s", donor, error)
                self._answers.append(f"{donor}: {error}")
                tries = 0
            finally:
                self._settle(piece)
        connection.close()

    def whole(self) -> Staged:
        """Raises PeerFailed if something is missing, Damaged if it is not what was announced."""
        if self._missing:
            raise PeerFailed(
                f"{len(self._missing)} pieces of the state are missing: {'; '.join(self._answers)}"
            )
        return Staged.restore(self.manifest, self.buffer, self._hashes)  # compared as they came

    def _read(self, connection: Connection, piece: Piece) -> None:
        step = self.manifest["step"]
        source = connection.ask(op="chunks", step=step, first=piece.first, count=piece.count)
        view = memoryview(self.buffer)
        while piece.count:
            start = piece.first * CHUNK_BYTES
            found = receive_chunk(source, view[start : start + CHUNK_BYTES])
            if found != self._hashes[piece.first]:
                raise Damaged(f"chunk {piece.first} of step {step} is another one")
            piece.first += 1
            piece.count -= 1
            self.sources[connection.address] += 1

    def _next(self) -> Piece | None:
        """What to ask for; None once nothing can be missing any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._missing or not self._asked)
            if not self._missing:
                return None
            self._asked += 1
            return self._missing.popleft()

    def _settle(self, piece: Piece) -> None:
        """What was not read of it is missing again."""
        with self._changed:
            self._asked -= 1
            if piece.count:
                self._missing.append(piece)
            self._changed.notify_all()


class Follower:
    """Hears of the steps that peers committed and went beyond, until it is stopped. The bytes of a
    step come before that, as soon as one has made it: nobody has to wait for them later.

    `tell` is given messages: `made` with a step's reduced gradient, `up_to_date` each time that
    there is nothing newer, and `cannot_follow` once if no donor can help.
    """

    def __init__(
        self,
        donors: Sequence[str],
        token: str,
        step: int,
        tell: Callable[[dict[str, Any]], None],
        *,
        pool: BufferPool | None = None,
        ahead: Reduced | None = None,
    ) -> None:
        """`step`: the first one wanted; `ahead`: that one, if its bytes are here already. `pool`:
        see `Connection.reduced`."""
        self._pool = pool
        self._connections = deque(Connection(donor, token) for donor in donors)
        self._step = step
        self._tell = tell
        self._stopped = threading.Event()
        self._room = threading.Semaphore(2)  # steps passed on and not yet applied
        self._passed_on: deque[Reduced] = deque()  # these
        self._ahead = ahead  # the next one, which may still be made anew
        self._asked: Connection | None = None
        self._missed = -1  # a step that a donor made and keeps no longer
        self._level = False  # with the donor once: from now on it may wait for its next step
        self._error = "no peer was named"
        self._thread = threading.Thread(target=self._run, name="drydock-follow", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """May be called while a step is on its way: it is not passed on."""
        self._stopped.set()
        self._room.release()

    def drawn(
        self,
        step: int,
        donors: Collection[str] = (),
        broken: Callable[[], bool] = lambda: False,
    ) -> Reduced | None:
        """Once it is stopped: this step, if its bytes are here, or just come from one of these
        donors, without a rest, and unless what they are wanted for is `broken`. It may have been
        made anew since."""
        asked = self._asked
        if step == self._step and asked is not None and asked.receiving and asked.address in donors:
            before = -1
            while self._thread.is_alive() and asked.received != before and not broken():
                before = asked.received
                self._thread.join(REST_S)
        here = [*self._passed_on, self._ahead]
        return next((one for one in here if one is not None and one.step == step), None)

    def applied(self, step: int) -> None:
        """One that was passed on is applied, up to this step: its buffer is no longer needed."""
        while self._passed_on and self._passed_on[0].step <= step:
            self._passed_on.popleft()
        self._room.release()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._room.acquire()
            reduced = self._next()
            if self._stopped.is_set() or reduced is None:
                break
            self._passed_on.append(reduced)
            self._ahead = None
            self._step += 1
            self._tell({"op": "made", "reduced": reduced})
        for connection in self._connections:
            connection.close()

    def _next(self) -> Reduced | None:
        """The next step, from any donor; None if none can ever give it."""
        while self._connections and not self._stopped.is_set():
            donor = self._asked = self._connections[0]
            wait_s = WAIT_S if self._level else 0.0
            try:
                if self._ahead is None:
                    self._ahead = donor.reduced(self._step, wait_s, pool=self._pool)
                    continue  # it may be stopped by now
                self._ahead = donor.reduced(
                    self._step, wait_s, settled=True, have=self._ahead, pool=self._pool
                )
                return self._ahead
            except NotYet:
                if self._missed == self._step:
                    self._give_up(donor)  # others have made it: this one was left behind
                    continue
                self._level = True
                self._connections.rotate()  # one that was left behind makes no step any more
                self._tell({"op": "up_to_date", "step": self._step - 1})
            except (PeerFailed, Damaged, KeyError, ValueError, MemoryError, RuntimeError) as error:
                log.warning("donor_failed peer=%s error=%s", donor.address, error)
                self._give_up(donor)
                self._error = str(error)
                if isinstance(error, NotKept):  # those of whom copies were taken keep more
                    self._missed = self._step
        if not self._stopped.is_set():
            self._tell({"op": "cannot_follow", "error": self._error})
        return None

    def _give_up(self, donor: Connection) -> None:
        donor.close()
        self._connections.popleft()


def _no_memory(size: int, what: str, error: Exception) -> MemoryError:
    return MemoryError(
        f"{size} bytes for {what} cannot be had ({error}): free memory on this node, or raise the "
        "limit of this process (ulimit -v, its container's) by so many"
    )


def _manifest(donors: Sequence[str], token: str, step: int, digest: str) -> dict[str, Any]:
    answers = []
    for donor in donors:
        connection = Connection(donor, token)
        try:
            manifest = connection.manifest(step)
        except PeerFailed as error:
            answers.append(f"{donor}: {error}")
            continue
        finally:
            connection.close()
        if manifest["digest"] == digest:
            return manifest
        answers.append(f"{donor}: its copy of step {step} is {manifest['digest']}")
    raise PeerFailed(f"no peer holds step {step} with digest {digest}: {answers}")
