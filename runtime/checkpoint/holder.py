"""The process that keeps peers' checkpoints in this node's memory.

    DRYDOCK_TOKEN=... python -m runtime.checkpoint.holder --job JOB --folder FOLDER [--host ADDRESS]

One for each job and node; the job's ranks start it where it does not run. It outlives them, and
ends when nobody was connected for long, or, if it is told to (SIGTERM), once nobody is: those who
are told to end with it save once more. Of each rank it keeps the newest state that came whole, and
receives the next one beside it; what it has of another run, or cut among other ranks, stays until
these can take its place. Imports no torch.

Requests, each behind the job's token (see `runtime.serving`):
    {"op": "list"}  answered by {"held": [...]}, what is held of all ranks, without their tables
    {"op": "hold", "run", "rank", "ranks", "step", "save", "epoch", "bytes"}  and perhaps "kept",
        epoch and step of the last state of which every rank's part is held; answered by
        {"waits": true} now and then while another replica's of that rank is on its way; then by
        {"held": digest} if that step of that epoch is held already, else by {"newest": save}, the
        last one held of that rank, or ""; the state's table and facts follow, and "same", how many
        of its first chunks are those of that save, answered by {"copied": so many} now and
        then, at last with "all"; then the other chunks, and the answer to these is {"held": digest}
    {"op": "read", "rank", "save", "digest"}  answered by the state's step and table, and its chunks
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
import select
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime import client
from runtime.checkpoint.memory_left import LOOK_BYTES, demand
from runtime.checkpoint.store import shortened
from runtime.framing import (
    PeerFailed,
    Refused,
    receive_chunk,
    receive_json,
    send_chunk,
    send_json,
)
from runtime.image import CHUNK_BYTES, Damaged, Table, chunks_of, hash_of
from runtime.serving import RequestServer

log = logging.getLogger("drydock.holder")

IDLE_S = 1800.0  # a job that starts anew later than that begins from its disks
TOLD_S = 30.0  # so long it stays for those who are connected when it is told to end
SIGN_CHUNKS = 256  # after so many that are copied here the one that waits hears of it
SILENT_S = 60.0  # a connection on which nothing comes in the middle of a state
SIGN_S = SILENT_S / 4  # so often who waits for another's state hears that we are there
MEMORY = "drydock-held"  # what is held, by its name in /proc
KEPT = 2  # of a rank in one series at most, beside the one that is received
LOOKS_S = 1.0  # who only looks whether there is a holder has the lock for a moment
LOCK, ADDRESS = "holder.lock", "holder.json"
#: What a request may end with, and is answered with.
FAILURES = (PeerFailed, OSError, MemoryError, Damaged, KeyError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True)
class Label:
    """Which state it is. Of two of one rank the one of later training is the newer."""

    run: str
    rank: int
    ranks: int
    step: int
    save: str
    epoch: int
    bytes: int

    @property
    def age(self) -> tuple[int, int]:
        return self.epoch, self.step

    @property
    def series(self) -> tuple[str, int]:
        """Only states of one run that are cut among as many ranks follow each other, and make one
        checkpoint together."""
        return self.run, self.ranks

    @property
    def keep(self) -> int:
        """How many of a rank are kept: where a state has several parts, one of which may not come,
        also the one before."""
        return 1 if self.ranks == 1 else KEPT


class Buffer:
    """Memory for one state; as a memfd it is counted by name in /proc, and can be looked into."""

    def __init__(self, size: int) -> None:
        """Raises MemoryError, OSError: it is better that a peer looks for another holder than that
        this node ends what trains here."""
        self.size = size
        self.users = 0  # who read it now
        fd = os.memfd_create(MEMORY)
        try:
            for at in range(0, max(size, 1), LOOK_BYTES):
                demand(size - at)
                # Fails here, not at the first touch.
                os.posix_fallocate(fd, at, min(LOOK_BYTES, max(size, 1) - at))
            self.memory = memoryview(mmap.mmap(fd, max(size, 1)))[:size]
        finally:
            os.close(fd)


@dataclass(frozen=True, kw_only=True)
class Held:
    """A state that came whole."""

    label: Label
    facts: dict[str, Any]
    table: Table
    hashes: tuple[str, ...]
    digest: str  # as whoever gave it was told, and agreed
    buffer: Buffer

    def verify(self) -> None:
        """No chunk's hash tells of the table. Raises Damaged if that was changed since."""
        if (found := self.table.digest(self.hashes)) != self.digest:
            raise Damaged(
                f"what is held of rank {self.label.rank}, step {self.label.step}, is described "
                f"otherwise than when it was received: digest {found}, not {self.digest}"
            )


class Memory:
    """The states that are held of each rank, and for each rank a spare buffer for the next state.

    The states of one rank are kept by series, and in each series the newest comes first.
    """

    def __init__(self) -> None:
        self._held: dict[int, list[Held]] = {}
        self._spare: dict[int, Buffer] = {}
        self._receiving: set[int] = set()  # ranks
        self._givers: dict[socket.socket, str] = {}  # who gave states, and of which run
        self._changed = threading.Condition()

    def listed(self) -> list[Held]:
        with self._changed:
            return [one for held in self._held.values() for one in held]

    def begin(self, label: Label, giver: socket.socket) -> Held | Buffer | None:
        """Where to receive this state; or what is held of it, if another replica gave it before.
        None if one of the same rank is on its way, and still is after SIGN_S. Raises Refused if a
        later one is held, or others give states of another run; MemoryError, OSError."""
        with self._changed:
            self._admit(giver, label.run)
            if not self._changed.wait_for(lambda: label.rank not in self._receiving, SIGN_S):
                return None
            ours = self._ours(label)
            for held in ours:
                if held.label.age == label.age:
                    return held  # by another replica, or asked for twice: all have one state
                if held.label.age > label.age:
                    raise Refused(f"a later one is held: step {held.label.step}")
            self._receiving.add(label.rank)
            # All ranks had time to give a first before any gives a second: of others one is left.
            self._keep_others(label, KEPT - 1 if ours else KEPT)
            spare = self._spare.pop(label.rank, None)
        try:
            if spare is None or spare.size != label.bytes or spare.users:
                del spare  # before another is made
                spare = Buffer(label.bytes)
        except BaseException:
            self.fail(label, None)
            raise
        return spare

    def finish(self, held: Held, kept: tuple[int, int] | None = None) -> None:
        """It is whole. The one that is too old by now makes room for the next, and what there is of
        another series goes, once there are as many of this one as are kept. `kept`: the age of the
        last of which every rank's part is held, which stays, though others of our rank are newer;
        of no rank, also of one that saves elsewhere by now, an older one is of use."""
        label = held.label
        with self._changed:
            self._held.setdefault(label.rank, []).insert(0, held)
            ours = self._ours(label)
            if len(ours) >= label.keep:
                self._keep_others(label, 0)
                # The first, and of the others that which all have before the newer ones.
                ours[1:] = sorted(ours[1:], key=lambda one: one.label.age != kept)
                self._held[label.rank] = ours[: label.keep]
            for old in ours[label.keep :]:
                self._spare[label.rank] = old.buffer
            if kept is not None:
                self._drop_before(kept, label)
            self._receiving.discard(label.rank)
            self._changed.notify_all()

    def fail(self, label: Label, buffer: Buffer | None) -> None:
        with self._changed:
            if buffer is not None:
                self._spare[label.rank] = buffer
            self._receiving.discard(label.rank)
            self._changed.notify_all()

    def _drop_before(self, kept: tuple[int, int], label: Label) -> None:
        """Whoever has nothing left has no buffer for a next one either."""
        for rank, held in [*self._held.items()]:
            self._held[rank] = [
                one for one in held if one.label.series != label.series or one.label.age >= kept
            ]
            if not self._held[rank]:
                del self._held[rank]
                self._spare.pop(rank, None)

    def newest(self, label: Label) -> Held | None:
        """Of its rank and series."""
        with self._changed:
            return next(iter(self._ours(label)), None)

    def take(self, rank: int, save: str, digest: str) -> Held:
        """Which stays as it is until it is given back; one of another series may have the same
        name. Raises PeerFailed."""
        with self._changed:
            for held in self._held.get(rank, []):
                if (held.label.save, held.digest) == (save, digest):
                    held.buffer.users += 1
                    return held
        raise PeerFailed(f"no save {save} of rank {rank} is held here")

    def give_back(self, held: Held) -> None:
        with self._changed:
            held.buffer.users -= 1

    def _ours(self, label: Label) -> list[Held]:
        held = self._held.get(label.rank, [])
        return [one for one in held if one.label.series == label.series]

    def _keep_others(self, label: Label, most: int) -> None:
        """Of other series so many of each rank, and no buffers for the next of them: a job that
        began anew, or was cut otherwise, takes no more memory than it did."""
        for rank, held in self._held.items():
            others = [one for one in held if one.label.series != label.series]
            if others:
                ours = [one for one in held if one.label.series == label.series]
                self._held[rank] = ours + others[:most]
                self._spare.pop(rank, None)

    def _admit(self, giver: socket.socket, run: str) -> None:
        """All who are there give states of one run: of two each would take the place of what the
        other gave. Raises Refused."""
        self._givers = {one: of for one, of in self._givers.items() if is_there(one)}
        if others := {of for one, of in self._givers.items() if one is not giver} - {run}:
            raise Refused(
                f"others save run {others.pop()} of this job here, and this is run {run}: see that "
                "the shared folder, whose checkpoints/run names it, is mounted and one folder on "
                "all nodes; to begin anew end the holders on all nodes"
            )
        self._givers[giver] = run


def is_there(connection: socket.socket) -> bool:
    """Whether neither its other end has hung up, nor we."""
    poll = select.poll()
    try:
        poll.register(connection, select.POLLRDHUP)
    except ValueError:  # we have
        return False
    return not poll.poll(0)


class Holder:
    """Answers the requests of ranks: to list, to read, or to hold states in memory."""

    def __init__(self) -> None:
        self.memory = Memory()

    def serve(self, connection: socket.socket, request: dict[str, Any]) -> None:
        """Answer one request whose token was checked: op `list`, `read` or `hold`.

        The peer must send and take bytes without a pause of SILENT_S seconds meanwhile. A request
        that fails is answered with {"error", "everywhere"}. Then the error is raised: PeerFailed
        (Refused if no other holder would do it either), OSError, MemoryError, Damaged, KeyError,
        TypeError or ValueError.
        """
        op = request.pop("op", None)
        connection.settimeout(SILENT_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(SILENT_S))
        try:
            self._answer(connection, op, request)
        except FAILURES as error:
            log.warning("refused op=%s error=%s", op, error)
            said = {"error": str(error) or repr(error), "everywhere": isinstance(error, Refused)}
            send_json(connection, said)
            raise
        connection.settimeout(None)  # between two saves as long as it takes

    def _answer(self, connection: socket.socket, op: object, request: dict[str, Any]) -> None:
        del request["token"]
        if op == "list":
            found = [
                {**vars(one.label), "facts": one.facts, "digest": one.digest}
                for one in self.memory.listed()
            ]
            send_json(connection, {"held": found})
        elif op == "read":
            rank, save, digest = int(request["rank"]), str(request["save"]), str(request["digest"])
            self._give(connection, rank, save, digest)
        elif op == "hold":
            kept = request.pop("kept", None)
            self._receive(connection, Label(**request), None if kept is None else tuple(kept))
        else:
            raise PeerFailed(f"unknown op {op!r}")

    def _give(self, connection: socket.socket, rank: int, save: str, digest: str) -> None:
        held = self.memory.take(rank, save, digest)
        try:
            held.verify()
            # Not more than came with it: what could be received can also be given.
            send_json(connection, {"step": held.label.step, **held.table.describe()})
            for chunk, known in zip(chunks_of(held.buffer.memory), held.hashes, strict=True):
                send_chunk(connection, chunk, known)
        finally:
            self.memory.give_back(held)

    def _receive(
        self, connection: socket.socket, label: Label, kept: tuple[int, int] | None
    ) -> None:
        while (found := self.memory.begin(label, connection)) is None:
            send_json(connection, {"waits": True})
        if isinstance(found, Held):
            found.verify()
            send_json(connection, {"held": found.digest})
            return
        before = self.memory.newest(label)  # which stays until this one is there
        try:
            send_json(connection, {"newest": "" if before is None else before.label.save})
            described = receive_json(connection)
            table = Table.restore(described["table"])
            if table.bytes != label.bytes:
                raise PeerFailed(f"a table of {table.bytes} bytes for {label.bytes}")
            hashes: list[str] = []
            for chunk_hash in _copied(before, table, int(described["same"]), found):
                hashes.append(chunk_hash)
                if len(hashes) % SIGN_CHUNKS == 0:  # it takes a while
                    send_json(connection, {"copied": len(hashes)})
            send_json(connection, {"copied": len(hashes), "all": True})
            for start in range(len(hashes) * CHUNK_BYTES, label.bytes, CHUNK_BYTES):
                part = found.memory[start : start + CHUNK_BYTES]
                hashes.append(receive_chunk(connection, part))
            facts = dict(described["facts"])
            digest = table.digest(hashes)
        except BaseException:
            self.memory.fail(label, found)
            raise
        held = Held(
            label=label, facts=facts, table=table, hashes=tuple(hashes), digest=digest,
            buffer=found,
        )  # fmt: skip
        self.memory.finish(held, kept)
        log.debug("held step=%s rank=%s save=%s", label.step, label.rank, label.save)
        send_json(connection, {"held": held.digest})


def _copied(before: Held | None, table: Table, chunks: int, into: Buffer) -> Iterator[str]:
    """The hashes of a state's first chunks, each once it is there as in the one before: they are of
    frozen weights. Raises PeerFailed if they cannot be, Damaged if they are no longer what was
    received."""
    frozen = 0 if before is None else min(before.table.frozen, table.frozen)
    if not 0 <= chunks <= frozen // CHUNK_BYTES:
        raise PeerFailed(f"{chunks} chunks are not frozen in what is held")
    for number in range(chunks):
        assert before is not None  # noqa: S101 - else nothing is frozen, and there are none
        place = slice(number * CHUNK_BYTES, (number + 1) * CHUNK_BYTES)
        into.memory[place] = before.buffer.memory[place]
        if hash_of(into.memory[place]) != before.hashes[number]:
            names = shortened(tuple(before.table.names_in(number)))
            raise Damaged(
                f"what is held of rank {before.label.rank}, tensors {names}, is not what was "
                "received"
            )
        yield before.hashes[number]


def make_ours(folder: Path) -> None:
    """Make the folder in which a job's ranks find the holder of their node. Raises PermissionError
    if another user may put an address there, where they would tell the job's token; OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()  # all may write to a link, and so it is refused
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"{folder} is of user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}: another "
            "user could put an address there, and would be told the job's token: remove it, or "
            f"set {client.ENV_HOLDER_DIR} to a folder of your own"
        )


def hold_alone(folder: Path) -> int:
    """Be the one holder of this folder, for as long as the descriptor is open. Raises
    BlockingIOError if another is, PermissionError as `make_ours` does."""
    make_ours(folder)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    end = time.monotonic() + LOOKS_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except OSError as error:
            if not isinstance(error, BlockingIOError) or time.monotonic() > end:
                os.close(lock)
                raise
        time.sleep(LOOKS_S / 50)


def announce(folder: Path, address: str) -> None:
    """Where ranks of this node find us."""
    draft = folder / f".{ADDRESS}-{os.getpid()}"
    draft.write_text(json.dumps({"address": address, "pid": os.getpid()}))
    draft.replace(folder / ADDRESS)


def await_end(server: RequestServer, idle_s: float) -> None:
    """Until nobody was connected for so long, or SIGTERM, which must be blocked, tells to end."""
    over = threading.Event()

    def idle() -> None:
        server.await_idle(idle_s)
        over.set()

    def told() -> None:
        signal.sigwait({signal.SIGTERM})
        server.await_parted(TOLD_S)
        over.set()

    for wait in (idle, told):
        threading.Thread(target=wait, daemon=True).start()
    over.wait()


def main() -> None:
    """Say the address on standard output, and serve."""
    import argparse  # writers import this module, too, and do without

    parser = argparse.ArgumentParser(
        prog="runtime.checkpoint.holder",
        description=(__doc__ or "").partition("\n\n")[0],
        epilog="In the environment: DRYDOCK_TOKEN, the job's token, which must be there.",
    )
    parser.add_argument("--job", required=True, help="the job's id, the same on all its ranks")
    parser.add_argument(
        "--folder", required=True, type=Path, help="the holders' folder of this node, of all jobs"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="the address of this node at which ranks of other nodes reach it",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=0,
        help="the port to listen on; 0, the default, takes a free one",
    )
    parser.add_argument(
        "--idle",
        type=float,
        default=IDLE_S,
        help="end after so many seconds in which no rank was connected",
    )
    given = parser.parse_args()
    logging.basicConfig(format="%(asctime)s holder %(message)s", level=logging.INFO)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # before there are threads
    folder = given.folder / given.job
    try:
        lock = hold_alone(folder)
        (folder / ADDRESS).unlink(missing_ok=True)  # of one that was killed
    except BlockingIOError:
        raise SystemExit(f"a holder runs in {folder} already") from None
    except PermissionError as error:
        raise SystemExit(str(error)) from None
    token = os.environ.get(client.ENV_TOKEN, "")
    if not token:
        raise SystemExit(f"give the job's token in {client.ENV_TOKEN}")
    server = RequestServer(given.host, token, Holder().serve, idle_s=None, port=given.port)
    announce(folder, server.address)
    sys.stdout.write(server.address + "\n")
    sys.stdout.flush()
    await_end(server, given.idle)
    (folder / ADDRESS).unlink(missing_ok=True)
    os.close(lock)


if __name__ == "__main__":
    main()
