"""A peer's memory as a tier: which holder keeps ours, how a state gets there, and back.

See `holder` for the process that keeps it. Imports no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime import client
from runtime.checkpoint.holder import ADDRESS, IDLE_S, LOCK, SILENT_S, Label, make_ours
from runtime.checkpoint.store import Progress, shortened, unseen
from runtime.framing import PeerFailed, receive_chunk, receive_json, send_chunk, send_json
from runtime.image import CHUNK_BYTES, Damaged, Staged, Table, chunks_of, hash_of, pages
from runtime.serving import STRANGER, TIMEOUT_S, Requests

log = logging.getLogger("drydock.checkpoint")

#: Names another module to run as the holder: one that fails when it is told to, for a trial.
HOLDER_MODULE = "DRYDOCK_CHECKPOINT_HOLDER"
START_S = 20.0  # how long a holder may take to start
AGAIN_S, SELDOM_S = 1.0, 60.0  # after one was lost, and at most once none can be had
#: So long saves to a holder fail until another is asked: one that died is back in a few seconds.
LOST_S = 30.0
#: So many replicas that follow each other save to one holder where another hall is the farthest:
#: what they save is one state, so it crosses from hall to hall once for all of them.
SHARED_BY = 16
TURN_S = 2 * START_S + 5.0  # how long a rank waits for another of its node that starts one
LOCK_POLL_S = 0.05
LOG = "holder.log"
_STARTING = "starting.lock"
#: What a holder says of each state that it lists.
_LISTED: dict[str, Callable[[Any], Any]] = {
    "run": str, "rank": int, "ranks": int, "step": int, "save": str, "epoch": int, "digest": str,
    "facts": dict,
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A holder, as it is told to peers."""

    address: str  # host:port
    domain: str  # what fails together, from the largest to the node: "hall-1/rack-7/node-12"

    def describe(self) -> dict[str, str]:
        return {"address": self.address, "domain": self.domain}


def shared_levels(one: str, other: str) -> int:
    """How many levels of two failure domains are the same; all levels, if it is the same node."""
    pairs = zip(one.split("/"), other.split("/"), strict=False)
    levels = 0
    for mine, theirs in pairs:
        if mine != theirs:
            break
        levels += 1
    return levels


def holder_for(
    members: Sequence[Mapping[str, Any]],
    replica: int,
    rank: int,
    domain: str,
    lost: Collection[str] = (),
) -> Place | None:
    """The holder that keeps the part of this rank: that of the member, from the next one on round,
    whose failure domain has least in common with ours. Of many members some share one, whose state
    is sent there once, but not all. None if nobody has one.

    `members`: as an epoch's grant names them, in the order of their numbers. `lost`: addresses at
    which nobody keeps anything.
    """
    numbers = [int(member["replica"]) for member in members]
    at = numbers.index(replica)
    in_turn = [*members[at + 1 :], *members[: at + 1]]
    known = [member["holders"][rank] for member in in_turn if member.get("holders")]
    places = [Place(str(one["address"]), str(one["domain"])) for one in known if one]
    places = [place for place in places if place.address not in lost]
    near = [shared_levels(domain, place.domain) for place in places]
    far = [place for place, levels in zip(places, near, strict=True) if levels == min(near)]
    return far[at // SHARED_BY % len(far)] if far else None


def in_turn(nodes: Collection[Place], ours: Place) -> list[Place]:
    """The holders of the other nodes of a job each of whose nodes has a part of the state: first
    the one that keeps our part too. It is that of one node alone, and of another group of nodes
    unless more than half of them are of one: the groups are those that the largest things which
    fail together, and in which not all are, make."""
    domains = [place.domain.split("/") for place in nodes]
    level = 0
    while (
        len({tuple(domain[: level + 1]) for domain in domains}) == 1 < len({*map(tuple, domains)})
    ):
        level += 1
    ordered = sorted(nodes, key=lambda place: (place.domain.split("/"), place.address))
    sizes = Counter(tuple(domain[: level + 1]) for domain in domains)
    shift = max(sizes.values()) % len(ordered) or 1
    first = ordered.index(ours) + shift
    turned = [ordered[(first + place) % len(ordered)] for place in range(len(ordered))]
    return [place for place in turned if place != ours]


class Keepers:
    """Which holder keeps ours, by whether what we save reaches it."""

    def __init__(self, rank: int, domain: str) -> None:
        self.keeper: Place | None = None
        self._rank = rank
        self._domain = domain
        #: the one that does, of all but those at lost addresses
        self._of: Callable[[Collection[str]], Place | None] = lambda _lost: None
        self._lost: set[str] = set()  # addresses
        self._failing = ("", 0.0)  # the address to which saves fail, and since when, monotonic
        self._chosen_at = 0.0  # when it was, monotonic
        self._keeps = False  # something that was asked of it since
        self._lock = threading.Lock()

    def meet(self, members: Sequence[Mapping[str, Any]], replica: int) -> None:
        """The members of an epoch: what was lost may be well by now, or be elsewhere."""
        self._choose_by(lambda lost: holder_for(members, replica, self._rank, self._domain, lost))

    def follow(self, places: Sequence[Place]) -> None:
        """The first of these to which saves do not fail."""
        self._choose_by(lambda lost: next((one for one in places if one.address not in lost), None))

    def failed(self, address: str) -> bool:
        """A save to it did; whether another keeps ours from now on."""
        now = time.monotonic()
        with self._lock:
            if self.keeper is None or self.keeper.address != address:
                return False
            failing, since = self._failing
            if failing != address:
                self._failing = (address, now)
                return False
            if now - since < LOST_S:
                return False
            self._lost.add(address)
            self._choose()
            return self.keeper.address != address

    def kept(self, asked: float) -> None:
        """A save was, that was asked for then, monotonic."""
        with self._lock:
            self._failing = ("", 0.0)
            self._keeps |= asked >= self._chosen_at

    def keeps(self) -> bool:
        """Whether the keeper has something of ours, and not only is to have it."""
        return self._keeps

    def _choose_by(self, of: Callable[[Collection[str]], Place | None]) -> None:
        with self._lock:
            self._of = of
            self._lost.clear()
            self._choose()

    def _choose(self) -> None:
        before = self.keeper
        self.keeper = self._of(self._lost)
        if self.keeper is None and self._lost:  # then one of them may be back
            self._lost.clear()
            self.keeper = self._of(())
        if self.keeper != before:
            self._chosen_at, self._keeps = time.monotonic(), False


# --- the holder of this node --------------------------------------------------------------------


def running(folder: Path) -> str:
    """The address of the holder of this folder of a job, "" if there is none."""
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        with contextlib.suppress(OSError, ValueError, KeyError):
            return str(json.loads((folder / ADDRESS).read_bytes())["address"])
        return ""
    else:
        fcntl.flock(lock, fcntl.LOCK_UN)  # a child that is forked meanwhile has it open, too
        return ""
    finally:
        os.close(lock)


def ensured(folder: Path, job: str, token: str, host: str, port: int = 0) -> str:
    """The address of this node's holder, which is started if none runs: if it can be at that port,
    or where the last one was, which peers know. Raises OSError."""
    inside = folder / job
    make_ours(inside)
    with _starting(inside):
        if found := running(inside):
            return found
        if known := port or _last_port(inside):
            with contextlib.suppress(OSError):  # another process may have it by now
                return _started(folder, job, token, host, known)
        return _started(folder, job, token, host, 0)


@contextlib.contextmanager
def _starting(folder: Path) -> Iterator[None]:
    """One rank starts the holder for all of this node. Raises TimeoutError, which is an OSError, if
    another is at it for too long: it may have been stopped."""
    lock = os.open(folder / _STARTING, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        end = time.monotonic() + TURN_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > end:
                    raise TimeoutError(
                        f"another rank starts a holder for {TURN_S:g} s: see {folder / LOG}, and "
                        f"which process has {folder / _STARTING} open"
                    ) from error
                time.sleep(LOCK_POLL_S)  # a lock has no event to wait for with a limit
        yield
    finally:
        with contextlib.suppress(OSError):  # a child that was forked meanwhile has it open, too
            fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def _last_port(folder: Path) -> int:
    """Of a holder that was killed; 0 if none was."""
    try:
        return int(json.loads((folder / ADDRESS).read_bytes())["address"].rpartition(":")[2])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0


def _started(folder: Path, job: str, token: str, host: str, port: int) -> str:
    arguments = ["--job", job, "--folder", str(folder.absolute())]
    arguments += ["--host", host, "--port", str(port)]
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    environment = {**os.environ, "PYTHONPATH": path, client.ENV_TOKEN: token}
    # It belongs to no placement: whoever ends all that a rank has started spares it. Nor is it a
    # rank: a card's fault hits those who compute on it.
    for name in (client.ENV_PLACEMENT, client.ENV_RANK):
        environment.pop(name, None)
    module = os.environ.get(HOLDER_MODULE, "runtime.checkpoint.holder")
    with (folder / job / LOG).open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            start_new_session=True,
            cwd="/",
            env=environment,
        )
    assert process.stdout is not None  # noqa: S101 - it is a pipe
    with process.stdout as said:
        readable = select.poll()  # select knows no descriptor above 1023
        readable.register(said, select.POLLIN)
        ready = readable.poll(START_S * 1000)
        address = said.readline().decode().strip() if ready else ""
    if not address:
        process.kill()
        process.wait()
        raise OSError(f"no holder could be started: see {folder / job / LOG}")
    return address


class OwnHolder:
    """This node's holder, for as long as we are there: while we are connected it does not end, and
    if it dies another takes its address, or, if that is taken, an address of its own."""

    def __init__(
        self,
        folder: Path,
        job: str,
        token: str,
        host: str,
        on_moved: Callable[[str], None] = lambda _address: None,
    ) -> None:
        """`on_moved` is called, on a thread of its own, with each other address that it has.
        Raises OSError if none can be had, or the one that runs has another token."""
        self._start = functools.partial(ensured, folder, job, token, host)
        self.address = self._start()
        if _refuses(self.address, token):
            raise OSError(
                f"the holder at {self.address} was started with another token, by a job of this "
                f"name: it ends {IDLE_S / 60:.0f} minutes after the last who knows that, or end it "
                f"by hand ({folder / job / ADDRESS} has its pid)"
            )
        self._token = token
        self._on_moved = on_moved
        self._connection: socket.socket | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="drydock-holder", daemon=True).start()

    def close(self) -> None:
        """It may end now."""
        self._closed.set()
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        pause_s = AGAIN_S
        while not self._closed.is_set():
            self._stay()
            if self._closed.wait(pause_s):
                return
            try:
                found = self._start(port=int(self.address.rpartition(":")[2]))
                pause_s = AGAIN_S
            except Exception as error:  # without this thread the node would have none any more
                pause_s = min(2 * pause_s, SELDOM_S)
                log.warning("holder_lost error=%s", error)
                continue
            if found != self.address:  # another process has that port by now, perhaps for good
                log.warning("holder_moved from=%s to=%s", self.address, found)
                self.address = found
                self._on_moved(found)

    def _stay(self) -> None:
        """Until the connection ends."""
        requests = Requests(self.address, self._token)
        try:
            self._connection = connection = requests.ask(op="list")
            receive_json(connection)
            connection.settimeout(None)
            while not self._closed.is_set() and connection.recv(1):
                pass
        except OSError as error:
            log.warning("holder_out_of_reach error=%s", error)
        finally:
            requests.close()


# --- states ---------------------------------------------------------------------------------------


def held(address: str, token: str, timeout_s: float = TIMEOUT_S) -> list[dict[str, Any]]:
    """What is held there: `holder.Label` with facts and digest. Raises PeerFailed."""
    requests = Requests(address, token, timeout_s)
    try:
        answer = receive_json(requests.ask(op="list"))
        return [
            {**one, **{name: kind(one[name]) for name, kind in _LISTED.items()}}
            for one in answer["held"]
        ]
    except OSError as error:
        raise PeerFailed(f"holder {address}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise PeerFailed(_of_another_version(address, error)) from error
    finally:
        requests.close()


def _of_another_version(address: str, error: Exception) -> str:
    return f"holder {address} is of another version: end it ({error!r})"


def _refuses(address: str, token: str) -> bool:
    try:
        held(address, token)
    except PeerFailed as error:
        return STRANGER in str(error)
    return False


class Keeping:
    """A connection to the holder that keeps ours."""

    def __init__(self, address: str, token: str) -> None:
        self.address = address
        self._requests = Requests(address, token, SILENT_S)
        self._before: tuple[str, list[str]] = ("", [])  # the last save, and its chunks' hashes

    def hold(
        self,
        label: Label,
        table: Table,
        facts: dict[str, Any],
        image: memoryview,
        kept: Sequence[int] | None = None,
    ) -> tuple[str, int]:
        """Have a state kept; its digest, once it is there whole, and how many bytes were sent: what
        the last save held already of weights that are frozen is not. `kept`: epoch and step of the
        last of which every rank's part is held. Raises PeerFailed, OSError, and Damaged if what is
        there is not what was sent."""
        try:
            return self._hold(label, table, facts, image, kept)
        except (OSError, Damaged):
            self.close()
            raise

    def close(self) -> None:
        self._requests.close()
        self._before = ("", [])  # what made us close may have been that it is another there

    def _hold(
        self,
        label: Label,
        table: Table,
        facts: dict[str, Any],
        image: memoryview,
        kept: Sequence[int] | None,
    ) -> tuple[str, int]:
        also = {} if kept is None else {"kept": kept}
        connection = self._requests.ask(op="hold", **vars(label), **also)
        hashes: list[str] = []
        sent = 0
        while (answer := receive_json(connection)).get("waits"):
            pass  # another replica's is on its way
        if "held" in answer:  # another replica was quicker: the same state, for all have the same
            hashes.extend(hash_of(chunk) for chunk in chunks_of(image))
        else:
            if "newest" not in answer:
                raise PeerFailed(f"holder {self.address} is of another version: end it")
            save, known = self._before
            frozen = image[: table.frozen if answer["newest"] == save else 0]
            for chunk, before in zip(chunks_of(frozen), known, strict=False):
                if hash_of(chunk) != before:
                    break
                hashes.append(before)
            described = {"table": table.describe(), "facts": facts, "same": len(hashes)}
            send_json(connection, described)
            while not receive_json(connection).get("all"):
                pass  # it copies those
            for chunk in chunks_of(image[len(hashes) * CHUNK_BYTES :]):
                hashes.append(hash_of(chunk))
                send_chunk(connection, chunk, hashes[-1])
                sent += len(chunk)
            answer = receive_json(connection)
        digest = table.digest(hashes)
        if answer["held"] != digest:
            raise Damaged(f"holder {self.address} has {answer['held']}, ours is {digest}")
        self._before = (label.save, hashes)
        return digest, sent


def read(
    address: str, token: str, rank: int, save: str, digest: str, progress: Progress = unseen
) -> Staged:
    """A rank's part of one save, each chunk compared, and all of it with the digest with which it
    was listed. `progress`: see `store.Progress`. Raises PeerFailed, and Damaged naming the tensors
    that are not what was given to be kept."""
    requests = Requests(address, token, SILENT_S)
    try:
        connection = requests.ask(op="read", rank=rank, save=save, digest=digest)
        described = receive_json(connection)
        table = Table.restore(described)
        buffer = pages(table.bytes)
        hashes = []
        for number, start in enumerate(range(0, table.bytes, CHUNK_BYTES)):
            try:
                part = buffer[start : start + CHUNK_BYTES]
                hashes.append(receive_chunk(connection, part))
            except Damaged as error:
                names = shortened(tuple(table.names_in(number)))
                raise Damaged(
                    f"holder {address}, rank {rank}, tensors {names}: {error}, so it is not what "
                    "was given to be kept: that node's memory changed it, or the way from it"
                ) from error
            progress(len(part))
        return Staged.restore({**described, "digest": digest}, buffer, tuple(hashes))
    except (KeyError, TypeError, ValueError) as error:
        raise PeerFailed(_of_another_version(address, error)) from error
    finally:
        requests.close()
