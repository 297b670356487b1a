"""Gloo groups that can be cut: build one for an epoch, reduce, sever it from another thread.

Gloo has no abort. What unblocks its collectives is shutdown(2) on the group's established sockets,
never on the listening one, which would end the process. A child that is forked closes its copies:
else a dead rank would look alive. Where a connection ends within a message, gloo closes its socket
and tells nobody who waits for that message, so its sockets are looked at.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    ProcessGroupGloo,
    Store,
)

from runtime.forking import in_children
from runtime.replica.membership import Severed, Silent
from runtime.replica.reach import NO_ANSWER

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work

log = logging.getLogger("drydock.gloo")

BUILD_S = 10.0  # a peer that does not come while the group is built is given up after this
#: Whether all reach each other is looked at if the group does not stand after this. After one that
#: never stood the next is given twice the time, up to `BUILD_S`, which each of its peers has.
DOUBT_S = 2.0
REDUCE_S = 3600.0  # the coordinator says when a peer is dead; this is only a last resort
#: A peer whose machine acknowledges nothing for so long is silent. A process that is stopped or
#: slow is not: its kernel answers, until what it does not read fills its memory.
SILENT_MS = 1_500
SEVERED_S = 0.05  # how long a collective may take to fail once its sockets are shut
POLL_S = 0.02  # how often who waits for one looks whether its epoch broke
LOOK_S = 0.1  # after so long also whether all of its sockets are there


class Rendezvous(Protocol):
    """Where the members of an epoch leave word for each other: the coordinator, through a link."""

    def set(self, epoch: int, key: str, value: str, /) -> None: ...

    def get(self, epoch: int, key: str, timeout_s: float, /) -> str: ...


class LinkStore(Store):
    """A group's rendezvous, carried by the coordinator's connection."""

    def __init__(
        self, link: Rendezvous, epoch: int, lane: int, patience_s: float = BUILD_S
    ) -> None:
        """`patience_s`: how long another may take to leave word."""
        super().__init__()
        self.link = link
        self.epoch = epoch
        self.lane = lane
        self.patience_s = patience_s
        self._waited_for: dict[str, str] = {}  # and not yet got: gloo does both, one after another

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # gloo gives bytes
        self.link.set(self.epoch, self._name(key), base64.b64encode(value).decode())

    def get(self, key: str) -> bytes:
        found = self._waited_for.pop(key, None)
        return base64.b64decode(self._ask(key) if found is None else found)

    def _ask(self, key: str) -> str:
        return self.link.get(self.epoch, self._name(key), self.patience_s)

    def _name(self, key: str) -> str:
        """Ranks of different numbers leave word for each other in one place."""
        return f"{self.lane}:{key}"

    def wait(self, keys: list[str], _timeout: datetime.timedelta | None = None) -> None:
        for key in keys:
            self._waited_for[key] = self._ask(key)


class Gloo:
    """The gloo device of this process, and the group that it has in each epoch.

    The members of a group are the ranks of one number, one in each replica.
    """

    def __init__(self, host: str, lane: int = 0) -> None:
        self.lane = lane
        before = listening_sockets()
        self.device = ProcessGroupGloo.create_device(hostname=host, lazy_init=False)
        ports = set(listening_sockets()) - set(before)
        if len(ports) != 1:
            raise RuntimeError(
                f"expected one new listening socket of gloo, found {sorted(ports)}; "
                "join before starting other servers in this process"
            )
        self.port = ports.pop()
        self.address = f"{host}:{self.port}"
        in_children(self._close_copies)
        self._changed = threading.Condition()
        self._members = 1
        self._began = 0.0  # to build the group, monotonic
        self._doubt_s = DOUBT_S
        #: the epoch's group once it stands, or why it never will; nothing before
        self._built: list[ProcessGroupGloo | Exception] = []
        self._in_gloo: list[threading.Thread] = []  # that connect a group, or end one
        self._broken_epoch = -1  # the highest epoch known to be broken
        self._epoch = 0
        self._peers: set[str] = set()  # where they listen
        #: the inode of each of this epoch's sockets, and of former ones, by its number
        self._sockets: dict[int, int] = {}
        self._former: dict[int, int] = {}
        #: called when a step's first collective has begun, before it is waited for
        self.begun: Callable[[], None] = lambda: None

    def build(self, link: Rendezvous, epoch: int, addresses: list[str], rank: int) -> None:
        """Begin to connect all ranks of an epoch: its first collective waits until they are.

        The connecting runs in a thread of its own. It costs the step under way nothing that way,
        and it cannot be interrupted while it waits for a peer that died, so it is left behind then,
        to end by its timeout.
        """
        former = self._built
        stood = any(isinstance(one, ProcessGroupGloo) for one in former)
        self._begin("drydock-release", former.clear)  # the last references: it joins their threads
        built: list[ProcessGroupGloo | Exception] = []
        with self._changed:
            never_stood = self._members > 1 and not stood
            self._epoch, self._members, self._built = epoch, len(addresses), built
            self._former = _open_still(self._former | self._sockets)
            self._sockets = {}
            self._peers = set(addresses) - {self.address}
            self._began = time.monotonic()
            self._doubt_s = min(2 * self._doubt_s, BUILD_S) if never_stood else DOUBT_S
        if len(addresses) == 1:
            return

        def connect() -> None:
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [self.device]
            options._timeout = datetime.timedelta(seconds=BUILD_S)
            result: ProcessGroupGloo | Exception
            try:
                store = LinkStore(link, epoch, self.lane)
                result = ProcessGroupGloo(store, rank, len(addresses), options)
                sockets = self._listen_for_silence()
            except Exception as error:  # raised again where the group is waited for
                result = error
            with self._changed:
                if self._built is built and not isinstance(result, Exception):
                    self._sockets = sockets
                built.append(result)
                self._changed.notify_all()

        self._begin("drydock-connect", connect)

    def _begin(self, name: str, work: Callable[[], None]) -> None:
        _begin(self._in_gloo, self._changed, name, work)

    def close(self) -> None:
        """Nothing more is summed. A thread that is in gloo when its process ends crashes it, also
        one of an epoch before, so all are waited for: at most until a peer that died has been
        given up twice, when it left no word and when it did not connect."""
        if any(thread.is_alive() for thread in self._in_gloo):
            self.sever(self._epoch)
        end = time.monotonic() + 2 * BUILD_S
        for thread in self._in_gloo:
            thread.join(max(0.0, end - time.monotonic()))
        self._peers = set()  # their addresses may be others' soon

    def all_reduce(self, buffer: torch.Tensor) -> None:
        """Sum the buffer over the group, in place. Raises Severed."""
        if self._members > 1:
            options = with_timeout(AllreduceOptions())
            self._run(lambda group: group.allreduce([buffer], options), buffer, self.begun)

    def exchange(self, given: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
        """Give `given[i]` to rank i; returns what each rank gave, `sizes[i]` numbers of rank i.

        Raises Severed.
        """
        if self._members == 1:
            return given
        sent = torch.cat(given)
        received = torch.empty(sum(sizes))
        options = with_timeout(AllToAllOptions())
        counts = [len(one) for one in given]
        self._run(
            lambda group: group.alltoall_base(received, sent, sizes, counts, options),
            (received, sent),
            self.begun,
        )
        return list(torch.split(received, sizes))

    def gather(self, mine: torch.Tensor, members: int) -> torch.Tensor:
        """Every rank's tensor, one behind the other; all are of one size. Raises Severed."""
        if self._members == 1:
            return mine
        parts = [torch.empty_like(mine) for _ in range(members)]
        options = with_timeout(AllgatherOptions())
        self._run(lambda group: group.allgather([parts], [mine], options), (parts, mine))
        return torch.cat(parts)

    def _run(
        self,
        start: Callable[[Any], Work],
        touched: object,
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        """Start a collective and see it end.

        The sockets alone are not trusted to end it: a collective that starts just as its group is
        severed may wait for ever, and so may one of which a message is lost in its middle. It is
        left behind then, with all that it may still touch.
        """
        group = self._connected()
        try:
            work = start(group)
            begun()
            if self._ends(work):
                return
        except RuntimeError as error:
            raise severed(str(error)) from error
        self._leave_behind(work, [group, touched])
        log.warning("abandoned epoch=%s", self._epoch)
        if not self.broken(self._epoch):
            raise Silent(
                f"a connection of epoch {self._epoch} ended, and nobody is known to be gone"
            )
        raise Severed(f"epoch {self._epoch} broke and its collective did not end")

    def _leave_behind(self, work: Work, used: list[object]) -> None:
        """Free what a collective uses once it has ended, by its timeout at the latest: gloo's
        threads use it until then, and to free a group waits for those."""

        running, changed = self._in_gloo, self._changed

        def ended(_future: object) -> None:  # on one of them, which must not be the last to know us
            _begin(running, changed, "drydock-release", used.clear)

        work.get_future().add_done_callback(ended)

    def _connected(self) -> ProcessGroupGloo:
        """The epoch's group, once it stands. Raises Severed."""
        with self._changed:
            left = max(0.0, self._began + self._doubt_s - time.monotonic())
            stands = self._changed.wait_for(
                lambda: self._built or self.broken(self._epoch),
                left if self._doubt_s < BUILD_S else None,
            )
            if self.broken(self._epoch):
                raise Severed(f"epoch {self._epoch} broke")
            if not stands:
                raise Silent(f"epoch {self._epoch} has no group: not all peers came")
            (found,) = self._built
        if isinstance(found, RuntimeError | OSError):
            raise severed(f"epoch {self._epoch} has no group: {found}")
        if isinstance(found, Exception):  # no other epoch would mend it
            raise found
        return found

    def _ends(self, work: Work) -> bool:
        """Wait for the end of a collective, of its epoch, or of one of its connections; False if it
        outlives that. Raises RuntimeError if it failed."""
        began = time.monotonic()
        while not _ended(work, POLL_S):
            is_late = time.monotonic() - began >= LOOK_S
            if self.broken(self._epoch) or (is_late and not self._are_all_connected()):
                return _ended(work, SEVERED_S)
        return True

    def _are_all_connected(self) -> bool:
        """Whether gloo has a socket to each of the group's other members still: it closes one once
        it has seen that the connection has ended."""
        needed = min(self._members - 1, len(self._sockets))
        return len(_open_still(self._sockets)) >= needed

    def _listen_for_silence(self) -> dict[int, int]:
        """Have the kernel end a connection on which what is sent is not acknowledged: the
        collective fails then, as it does at a peer's death. Who only waits for the other side
        hears of it from the coordinator. Returns the sockets' inodes, by their numbers."""
        found = {}
        for number, connection in group_sockets(self.address, self._peers).items():
            with connection, contextlib.suppress(OSError):  # it ended meanwhile
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_MS)
                inode = os.fstat(connection.fileno()).st_ino
                if self._former.get(number) != inode:
                    found[number] = inode
        return found

    def broken(self, epoch: int) -> bool:
        return self._broken_epoch >= epoch

    def sever(self, epoch: int) -> None:
        """Make every collective of this epoch fail now. May be called from any thread."""
        with self._changed:
            self._broken_epoch = max(self._broken_epoch, epoch)
            self._changed.notify_all()
            if epoch < self._epoch:
                return
            for connection in group_sockets(self.address, self._peers).values():
                with connection, contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _close_copies(self) -> None:
        """In a forked child."""
        for number, connection in own_sockets().items():
            with connection:
                if is_at(connection, self.address) or leads_to(connection, self._peers):
                    os.close(number)


def _begin(
    running: list[threading.Thread],
    changed: threading.Condition,
    name: str,
    work: Callable[[], None],
) -> None:
    """Do this on a thread of its own, which is one of those that are in gloo."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    with changed:
        running[:] = [*filter(threading.Thread.is_alive, running), thread]
        thread.start()


def _ended(work: Work, patience_s: float) -> bool:
    """Whether a collective ends in time. Raises RuntimeError if it failed.

    It is gloo's thread that wakes ours, and nothing of Python's: a call back into the interpreter
    costs a step of many processes on few cores more than one in a hundred of its time.
    """
    try:
        work.wait(datetime.timedelta(seconds=patience_s))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it was that error, or it ended at the last moment
    return True


def severed(why: str) -> Severed:
    """What a failed collective is: the peer may have died, or nothing of its machine answers."""
    signs = ("timed out", "timeout", *(os.strerror(code).lower() for code in NO_ANSWER))
    return Silent(why) if any(sign in why.lower() for sign in signs) else Severed(why)


def with_timeout(options: Any) -> Any:
    """The same options; the coordinator ends what hangs, the timeout is only a last resort."""
    options.timeout = datetime.timedelta(seconds=REDUCE_S)
    return options


def listening_sockets() -> list[int]:
    """Ports on which this process listens."""
    found = []
    for connection in own_sockets().values():
        with connection:
            if listens(connection):
                found.append(connection.getsockname()[1])
    return found


def group_sockets(own: str, peers: set[str]) -> dict[int, socket.socket]:
    """Duplicates of this process's sockets that lead from or to a gloo listener of the group, by
    the numbers of those."""
    found = {}
    for number, connection in own_sockets().items():
        ours = is_at(connection, own) or leads_to(connection, peers)
        if ours and not listens(connection):
            found[number] = connection
        else:
            connection.close()
    return found


def _open_still(sockets: dict[int, int]) -> dict[int, int]:
    """Those of these inodes that are open, under the same numbers."""
    found = {}
    for number, inode in sockets.items():
        with contextlib.suppress(OSError):  # nothing is open under this number
            if os.fstat(number).st_ino == inode:
                found[number] = inode
    return found


def listens(connection: socket.socket) -> bool:
    """Whether this TCP socket listens for connections (SO_ACCEPTCONN of socket(7))."""
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def is_at(connection: socket.socket, address: str) -> bool:
    """Whether the socket's own end has this address, written host:port."""
    return "{}:{}".format(*connection.getsockname()) == address


def leads_to(connection: socket.socket, peers: set[str]) -> bool:
    """Whether the socket's other end is one of `peers`, written host:port; False if unconnected."""
    try:
        return "{}:{}".format(*connection.getpeername()) in peers
    except OSError:  # it is not connected
        return False


def own_sockets() -> dict[int, socket.socket]:
    """All TCP sockets of this process by their numbers: duplicates, so that no number can be reused
    under us."""
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - Path would stat each entry
        try:
            if not str(Path(f"/proc/self/fd/{name}").readlink()).startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed meanwhile
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            found[int(name)] = connection
        else:
            connection.close()
    return found
