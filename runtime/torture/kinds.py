"""The kinds of fault: how each strikes in its victim's process, and how it may end.

The one place to add a kind: write its strike, enter it in KINDS. Imports no torch at the top, for
the runner reads this table too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from runtime.replica.observing import PHASES
from runtime.torture.damage import DAMAGES, Damage
from runtime.torture.network import ENV_SOCKET, ask

ANY = "any"
DONOR = "donor"  # while a newcomer takes the state over, one of those who have it is struck
AWAY = "away"  # while the coordinator is dead
COPY = "copy"  # of a state, for its checkpoint, beside the training
LOAD = "load"  # the whole job was killed, and reads a checkpoint from its disks
RECALL = "recall"  # the same, but the nodes' memory stayed, and it reads what that holds
#: In which the whole job begins anew.
LOADING = (LOAD, RECALL)
PACK = "pack"  # of a save, in its writer: a file of which some is packed
#: Of a save to an object store, in its writer.
TO_OBJECTS: tuple[str, ...] = ("put", "announce", "expire")
#: Of a save, in its writer.
WRITING: tuple[str, ...] = (
    *("write", PACK, "publish", "verify", "prune", "replicate"),
    *TO_OBJECTS,
)
RECEIVE = "receive"  # of a save, in the holder to whose memory it comes
#: Of a save, in another process than the training.
SAVING = (*WRITING, RECEIVE)
#: Of the whole job, but not of what its nodes hold in memory.
CRASH, BAD_MEMORY = "crash", "badmemory"
NAN = "nan"  # what is loaded leads to it
LOCAL, SHARED, BOTH = "local", "shared", "both"
#: Which disks: each node's own, the shared folder's, or both.
DISKS: tuple[str, ...] = (LOCAL, SHARED, BOTH)
#: Where a fault may be told to strike.
MOMENTS: tuple[str, ...] = (*PHASES, DONOR, AWAY, COPY, *SAVING, *LOADING, *DISKS, ANY)
#: Those that come only if the job saves and loads.
STORING = (COPY, *SAVING, *LOADING, *DISKS)
AT_A_STEP = tuple(moment for moment in MOMENTS if moment not in STORING)

#: What is struck.
Target = Literal["replica", "coordinator", "job", "writer", "holder", "disk"]

#: What becomes of whoever was struck.
Ending = Literal[
    "replaced",  # its process is dead, a new one is started
    "woken",  # stopped until it was given up, then it may go on
    "killed",  # as it is until it was given up, then killed and replaced
    "stays",  # nobody helps it: it must come back by itself
]

SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27  # of asm/socket.h
REAPPLY_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Order:
    """To one replica: strike, at the next moment of that name."""

    fault: int
    kind: str
    phase: str
    delay_s: float  # from the beginning of the phase
    seconds: float  # how long it lasts, if it passes by itself
    pid: int = 0  # the process to strike; 0: the one that reads this
    rank: int = 0  # of the replica's processes the one that is to
    replica: int = -1  # the one that is to
    other: int = -1  # whom it is to be parted from


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of fault."""

    name: str
    meaning: str
    strike: Callable[[Order], None]  # runs in the process that reads the order
    endings: tuple[Ending, ...]
    seconds: tuple[float, float] = (0.0, 0.0)  # from which `Order.seconds` is drawn
    breaks: bool = True  # the group that trains at the time ends by it
    drops: bool = True  # the others must give up whoever was struck
    pairs: bool = False  # between two replicas, one of which the others must give up
    several: bool = False  # may strike several replicas at once
    blocks: bool = False  # strikes on the training thread itself
    signal: int = 0  # what the runner sends from outside to strike at any moment; 0: it cannot
    target: Target = "replica"
    phases: tuple[str, ...] = AT_A_STEP  # in which it makes sense
    share: int = 1  # how often it is drawn, beside the others

    @property
    def on_coordinator(self) -> bool:
        return self.target == "coordinator"

    @property
    def ends(self) -> int | None:
        """With which status its victims' processes end by it; None if they do not."""
        if self.signal == signal.SIGKILL:
            return -signal.SIGKILL
        return 0 if self.signal == signal.SIGTERM else None

    @property
    def networked(self) -> bool:
        """Whether it needs a network of the run's own."""
        return self.pairs

    @property
    def stores(self) -> bool:
        """Whether it needs a job that saves, whatever the phase."""
        return self.target in ("job", "writer", "holder", "disk")


def send(number: int) -> Callable[[Order], None]:
    """A strike by a signal."""
    return lambda order: os.kill(order.pid or os.getpid(), number)


def halt(_order: Order) -> None:
    """Stop this process. Sent to this very thread: what is sent to a process may be taken up by
    another one, and this would run on until that has stopped them all."""
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def cut(_order: Order) -> None:
    """Shut down every TCP connection of this process; its listening sockets stay."""
    for connection in _sockets():
        with connection, contextlib.suppress(OSError):  # not connected, or shut already
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection.shutdown(socket.SHUT_RDWR)


def slow(order: Order) -> None:
    """Hold up the training thread; all others of this process go on."""
    time.sleep(order.seconds)


def blackhole(order: Order) -> None:
    """Drop every packet of this process, acknowledgements too, and reset nothing.

    Where the run has a network of its own, that does it. Elsewhere a socket filter of the kernel's
    drops what arrives, without privileges; what this process sends still leaves, but with no
    acknowledgement it soon falls silent. A network takes longer than a sum to be cut, so there too
    the filter drops what arrives until that is done.
    """
    _swallow()
    if path := os.environ.get(ENV_SOCKET):
        try:
            ask(path, op="isolate", replica=order.replica, seconds=order.seconds)
        finally:
            _filter(SO_DETACH_FILTER, 0)
        return
    threading.Thread(target=swallow, args=(order.seconds,), daemon=True).start()


def part(order: Order) -> None:
    """Drop what this replica and another one send each other, and reset nothing."""
    ask(
        os.environ[ENV_SOCKET],
        op="part",
        replica=order.replica,
        other=order.other,
        seconds=order.seconds,
    )


def nothing(_order: Order) -> None:
    """The runner does it, from outside."""


def swallow(seconds: float) -> None:
    """Drop what arrives at any TCP socket of this process, for so long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:  # again and again: a new connection must not get out either
        _swallow()
        time.sleep(REAPPLY_S)
    _filter(SO_DETACH_FILTER, 0)


def _swallow() -> None:
    # One instruction of classic BPF: accept no byte.
    program = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
    _filter(SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))


def _filter(option: int, value: bytes | int) -> None:
    for connection in _sockets():
        with connection, contextlib.suppress(OSError):  # closed meanwhile, or has no filter
            connection.setsockopt(socket.SOL_SOCKET, option, value)


def _sockets() -> list[socket.socket]:
    from runtime.replica.gloo import own_sockets  # imports torch, which a victim has already

    return list(own_sockets().values())


def _damaging(name: str, damage: Damage) -> Kind:
    """An outage; before the job starts again its newest checkpoint is damaged on these disks."""
    return Kind(
        name=name,
        meaning=f"outage, and of the newest checkpoint {damage.__doc__}",
        strike=nothing,
        endings=("replaced",),
        target="job",
        phases=DISKS,
    )


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            name="kill",
            meaning="SIGKILL of one or several replicas",
            strike=send(signal.SIGKILL),
            signal=signal.SIGKILL,
            endings=("replaced",),
            several=True,
            phases=(*AT_A_STEP, COPY, *LOADING),
            share=7,
        ),
        Kind(
            name="leave",
            meaning="SIGTERM of one or several replicas, which go between two steps",
            strike=send(signal.SIGTERM),
            signal=signal.SIGTERM,
            endings=("replaced",),
            several=True,
            phases=("forward", "backward", "reduce", "optimizer", AWAY, COPY, ANY),
        ),
        Kind(
            name="stop",
            meaning="SIGSTOP: a silent peer; woken or killed once it was given up",
            strike=halt,
            signal=signal.SIGSTOP,
            endings=("woken", "killed"),
            seconds=(0.2, 1.5),
            several=True,
        ),
        Kind(
            name="cut",
            meaning="all connections of a replica are shut down; its process lives",
            strike=cut,
            endings=("stays",),
            drops=False,  # while the coordinator is dead too, it may be back before anyone counts
            several=True,
        ),
        Kind(
            name="blackhole",
            meaning="no packet reaches a replica any more, for some seconds",
            strike=blackhole,
            endings=("stays", "killed"),
            seconds=(4.0, 6.0),
            several=True,
        ),
        Kind(
            name="part",
            meaning="two replicas reach all but each other, for some seconds",
            strike=part,
            endings=("stays",),
            seconds=(4.0, 8.0),
            drops=False,  # one of the two, and nobody says which
            pairs=True,
        ),
        Kind(
            name="slow",
            meaning="a replica is held up in a phase; nobody must be given up",
            strike=slow,
            endings=("stays",),
            seconds=(0.3, 4.0),  # also longer than the silence that is a death
            breaks=False,
            drops=False,
            blocks=True,
        ),
        Kind(
            name="coordinator",
            meaning="SIGKILL of the coordinator, which is started again a little later",
            strike=send(signal.SIGKILL),
            signal=signal.SIGKILL,
            endings=("replaced",),
            seconds=(0.1, 1.0),
            breaks=False,
            drops=False,
            target="coordinator",
            phases=(*PHASES, ANY),
        ),
        Kind(
            name="frozen",
            meaning="SIGSTOP of the coordinator for some seconds; nobody must be given up",
            strike=send(signal.SIGSTOP),
            signal=signal.SIGSTOP,
            endings=("woken",),
            seconds=(0.5, 4.0),
            breaks=False,
            drops=False,
            target="coordinator",
            phases=(*PHASES, ANY),
        ),
        Kind(
            name="writer",
            meaning="SIGKILL of a process that writes checkpoints, in a phase of its save",
            strike=send(signal.SIGKILL),
            endings=("replaced",),
            breaks=False,
            drops=False,
            target="writer",
            phases=WRITING,
        ),
        Kind(
            name="holder",
            meaning="SIGKILL of a process that holds states for peers, while it is given or gives",
            strike=send(signal.SIGKILL),
            endings=("replaced",),
            breaks=False,
            drops=False,
            target="holder",
            phases=(RECEIVE, RECALL),
        ),
        Kind(
            name="full",
            meaning="a disk of checkpoints is full for some seconds",
            strike=nothing,
            endings=("stays",),
            seconds=(2.0, 4.0),
            breaks=False,
            drops=False,
            target="disk",
            phases=(LOCAL, SHARED),
        ),
        Kind(
            name="slowdisk",
            meaning="each file of a checkpoint takes some seconds to write",
            strike=nothing,
            endings=("stays",),
            seconds=(3.0, 4.0),
            breaks=False,
            drops=False,
            target="disk",
            phases=(LOCAL, SHARED),
        ),
        Kind(
            name=CRASH,
            meaning="SIGKILL of the whole job; what the nodes hold in memory for peers stays",
            strike=send(signal.SIGKILL),
            endings=("replaced",),
            target="job",
            phases=(COPY, *SAVING, ANY),
        ),
        Kind(
            name=BAD_MEMORY,
            meaning="crash; in each state that a node holds a bit is another, no disk has newer",
            strike=nothing,
            endings=("replaced",),
            target="job",
            phases=(ANY,),
        ),
        Kind(
            name="outage",
            meaning="SIGKILL of the whole job and the nodes' memory; it goes on from its disks",
            strike=send(signal.SIGKILL),
            endings=("replaced",),
            target="job",
            phases=(COPY, *WRITING, ANY),
        ),
        Kind(
            name=NAN,
            meaning="outage; the newest checkpoint has NaN for weights, verifies, and is given up",
            strike=nothing,
            endings=("replaced",),
            target="job",
            phases=(ANY,),
        ),
        *(_damaging(name, damage) for name, damage in DAMAGES.items()),
    )
}

#: That are made between machines, where the run has such.
OF_NETWORK = ("blackhole", "part")
