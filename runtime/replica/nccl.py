"""NCCL groups that can be cut: a communicator for each epoch, aborted from another thread.

The training thread never calls into NCCL: what it waits for is begun and watched by a thread that
can be left behind. No group of ours has torch's watchdog, which would end a survivor's process.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    HashStore,
    Store,
)

from runtime.job import CONNECT_S, PATIENCE
from runtime.replica.gloo import REDUCE_S, Gloo, LinkStore, Rendezvous
from runtime.replica.gradients import Collectives
from runtime.replica.link import LinkLost
from runtime.replica.membership import Severed, Silent
from runtime.snapshot import queued_on

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work

log = logging.getLogger("drydock.nccl")

POLL_S = 0.0005  # NCCL tells nobody that a collective has ended: it must be asked
ABORT_S = 180.0  # how long an abort may take before what it was to free is left behind
ENDED_S = 0.2  # how long a collective may take to end once its group is aborted
TOLD_S = 2.0  # how long it may take to tell what is wrong with one that ended
#: After a change that was planned a peer's last sum may still wait for what our kernels have left
#: to NCCL's threads to send. An abort would be quicker than they are.
LINGER_S = 1.0
CLOSE_S = 5.0  # how long threads that are in NCCL may keep the process from ending
#: A group that is made while this is 1 has no watchdog. With one, an error of NCCL's would make
#: torch dump its traces, and after minutes end the process, at the hands of any other group in it.
NO_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"

T = TypeVar("T")
#: Makes a group from a rendezvous, our rank and the number of ranks.
Maker = Callable[[Store, int, int], Any]


class EpochGroup(Collectives, Protocol):
    """What the ranks of one number, one of each replica, do together for as long as an epoch."""

    address: str
    #: called on the caller's thread when a step's first collective has begun
    begun: Callable[[], None]

    def build(self, link: Rendezvous, epoch: int, addresses: list[str], rank: int) -> None:
        """Connect all members. May return before that is done, and then the first collective waits
        for it. Raises Severed as soon as the epoch breaks meanwhile."""

    def broken(self, epoch: int) -> bool:
        """Whether no collective of this epoch can succeed any more."""

    def sever(self, epoch: int) -> None:
        """Make every collective of this epoch fail now. May be called from any thread."""

    def close(self) -> None:
        """Nothing more is summed: this process is about to end."""


def group_for(model: torch.nn.Module, host: str, lane: int) -> EpochGroup:
    """The group that can exchange what is where the model's parameters are.

    `host`: where this process is reached. `lane`: the rank's number in its replica. Raises
    RuntimeError if they are on a card and this torch has no NCCL.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type != "cuda":
        return Gloo(host, lane)
    if lacking := missing():
        raise RuntimeError(f"the model is on {device}, and {lacking}")
    group = Nccl(device, lane)
    group.warm_up()
    return group


def missing() -> str:
    """What this torch lacks for exchanging what is on a card, and what to do; "" if nothing."""
    if torch.distributed.is_nccl_available():
        return ""
    return (
        f"torch {torch.__version__} was built without NCCL: install torch's build for CUDA, or "
        "keep the model in the processor's memory"
    )


@dataclass
class Live:
    """One epoch's communicator, from before it is made until it is aborted."""

    epoch: int
    hands: Hands
    group: Any = None  # once it is made
    aborted: threading.Event = field(default_factory=threading.Event)  # its abort has returned
    why: str = ""  # what NCCL says is wrong with it


class Nccl:
    """One card per process, one communicator per epoch: of the replicas' ranks of one number."""

    def __init__(self, device: torch.device, lane: int = 0, make: Maker | None = None) -> None:
        self.device = device
        self.lane = lane
        self.address = f"nccl:{device}"  # members meet through the coordinator
        self.begun: Callable[[], None] = lambda: None
        self._make = make or make_group
        self._changed = threading.Condition()
        self._broken_epoch = -1  # the highest epoch known to be broken
        self._members = 1
        self._live: Live | None = None
        self._threads: list[threading.Thread] = []  # that may be in NCCL
        os.environ.setdefault(PATIENCE, str(CONNECT_S))  # of a job that begins with one replica
        os.environ.setdefault(NO_WATCHDOG, "0")  # later it is only changed, which readers survive

    def warm_up(self) -> None:
        """Have NCCL look for the machine's networks and load its kernels now, by a group of this
        process alone, and not in the first epoch, where all others would wait for that. If it
        fails, that epoch tells why."""
        live = Live(-1, Hands())
        touched: list[torch.Tensor] = []

        def begin_and_end() -> None:
            touched.append(torch.zeros(1, device=self.device))
            live.group = self._make(HashStore(), 0, 1)
            with self._beside():
                live.group.allreduce(touched, AllreduceOptions()).wait()
            with self._changed:
                self._abort(live)

        self._watch(live.hands.thread)
        done = live.hands.do(begin_and_end)
        live.hands.end()
        try:
            done.result(CONNECT_S)
            live.aborted.wait(CLOSE_S)
        except Exception as error:
            keep_for_ever(live, touched)
            log.warning("not_warmed_up error=%r", error)

    def build(self, link: Rendezvous, epoch: int, addresses: list[str], rank: int) -> None:
        """Make the epoch's communicator. Raises Severed as soon as the epoch breaks meanwhile.

        It does not block, and comes to be with its first collective, which all members must join.
        """
        with self._changed:
            self._retire(LINGER_S)
            self._members = len(addresses)
            if self._members == 1:
                return
            live = self._live = Live(epoch, Hands())
            self._watch(live.hands.thread)
        store = LinkStore(link, epoch, self.lane, CONNECT_S)
        first = torch.zeros(1, device=self.device)

        def connect() -> Work:
            self._made(live, self._make(store, rank, len(addresses)))
            work: Work = live.group.allreduce([first], AllreduceOptions())
            return work

        self._see_through(live, connect, first)

    def all_reduce(self, buffer: torch.Tensor) -> None:
        """Sum the buffer over the group, in place. Raises Severed."""
        if self._members > 1:
            self._run(
                lambda group: group.allreduce([buffer], AllreduceOptions()), buffer, self.begun
            )

    def exchange(self, given: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
        """Give `given[i]` to rank i; returns what each rank gave, `sizes[i]` numbers of rank i.

        Raises Severed.
        """
        if self._members == 1:
            return given
        sent = torch.cat(given)
        received = torch.empty(sum(sizes), device=self.device)
        counts = [len(one) for one in given]
        self._run(
            lambda group: group.alltoall_base(received, sent, sizes, counts, AllToAllOptions()),
            (received, sent),
            self.begun,
        )
        return list(torch.split(received, sizes))

    def gather(self, mine: torch.Tensor, members: int) -> torch.Tensor:
        """Every rank's tensor, one behind the other; all are of one size. Raises Severed."""
        if self._members == 1:
            return mine
        parts = [torch.empty_like(mine) for _ in range(members)]
        self._run(lambda group: group.allgather([parts], [mine], AllgatherOptions()), (parts, mine))
        return torch.cat(parts)

    def broken(self, epoch: int) -> bool:
        return self._broken_epoch >= epoch

    def sever(self, epoch: int) -> None:
        """Make every collective of this epoch fail now. May be called from any thread."""
        with self._changed:
            self._broken_epoch = max(self._broken_epoch, epoch)
            self._changed.notify_all()
            if self._live is not None and self._live.epoch <= epoch:
                self._retire()

    def close(self) -> None:
        """Give up the last group and wait for threads that are in NCCL. One that came back from
        there while the interpreter ends would take the whole process down with SIGABRT."""
        with self._changed:
            self._retire(LINGER_S)
        late = time.monotonic() + CLOSE_S
        while alive := [thread for thread in self._threads if thread.is_alive()]:
            if (left_s := late - time.monotonic()) <= 0:
                return
            alive[0].join(left_s)  # it may begin another before it ends

    # --- one collective -------------------------------------------------------------------------

    def _run(
        self,
        start: Callable[[Any], Work],
        touched: object,
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        live = self._live
        if live is None:
            raise Severed(f"epoch {self._broken_epoch} broke")
        self._see_through(live, lambda: start(live.group), touched, begun)

    def _see_through(
        self,
        live: Live,
        begin: Callable[[], Work],
        touched: object,
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        """Let a collective begin and end. Raises Severed as soon as its epoch breaks meanwhile, and
        then leaves behind who began it, with all that it may still touch."""
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        started: Future[None] = Future()

        def on_stream() -> Work:
            with queued_on(stream):  # what was computed there is waited for on the card
                return begin()

        ended = live.hands.do(lambda: self._through(live, on_stream, started, touched))
        self._await(live, started, ended)
        if started.done():
            begun()
            self._await(live, ended)
        if ended.done() and ended.result():  # raises what is wrong with the card
            return
        self.sever(live.epoch)
        if live.why:  # a peer may have died, or nothing gets through: that is to be looked at
            raise Silent(live.why)
        raise Severed(f"epoch {live.epoch} broke")

    def _await(self, live: Live, *futures: Future[Any]) -> None:
        """Until one of them is done, or the epoch is broken."""
        for future in futures:
            future.add_done_callback(self._wake)
        with self._changed:
            self._changed.wait_for(
                lambda: self.broken(live.epoch) or any(one.done() for one in futures), REDUCE_S
            )

    def _wake(self, _future: object) -> None:
        with self._changed:
            self._changed.notify_all()

    # --- on the hands' thread -------------------------------------------------------------------

    def _through(
        self, live: Live, begin: Callable[[], Work], started: Future[None], touched: object
    ) -> bool:
        """See a collective through; whether it ended before its epoch.

        Raises torch.AcceleratorError if the card is broken, which no other epoch would mend.
        """
        work: Work | None = None
        try:
            self._check(live)
            work = begin()
            started.set_result(None)
            if self._whole(live, work):
                return True
        except torch.AcceleratorError:
            raise
        except Severed:  # before it began, so nothing is wrong with its group
            pass
        except (RuntimeError, LinkLost, TimeoutError) as error:
            live.why = str(error)
            self.sever(live.epoch)
        self._let_go(live, work, touched)
        return False

    def _check(self, live: Live) -> None:
        if self._live is not live:
            raise Severed(f"epoch {live.epoch} broke")

    def _made(self, live: Live, group: Any) -> None:
        """Raises Severed if the epoch broke while the group was made."""
        with self._changed:
            live.group = group
            if self._live is not live:
                self._abort(live)
        self._check(live)

    def _whole(self, live: Live, work: Work) -> bool:
        """Wait for a collective's end, or for that of its epoch; whether it was its own. Aborted
        kernels end as if all were well, with half a sum. Raises what NCCL says is wrong.

        While a group is aborted nothing of it may be asked: an abort that hangs holds the
        communicator's lock, and `is_completed` would wait for that with the interpreter's. So it
        is asked under our own lock, which is taken before anything is aborted.
        """
        with self._changed:
            while not self._changed.wait_for(
                lambda: self.broken(live.epoch) or work.is_completed(), POLL_S
            ):
                pass
            if self.broken(live.epoch):
                return False
            try:
                error = work.exception()
            except TypeError:  # torch before 2.13 cannot say it in Python: pytorch/pytorch#147312
                untold = True
            else:
                untold = False
                if error is not None:
                    raise error
        if untold:
            self._demand(work)
        return True

    def _demand(self, work: Work) -> None:
        """Wait for a collective that has ended: raises what is wrong with it. If something is, it
        is after an abort of torch's own, which may hang."""
        asked = Hands()
        self._watch(asked.thread)

        def wait() -> None:
            with self._beside():
                work.wait()

        told = asked.do(wait)
        asked.end()
        try:
            told.result(TOLD_S)
        except TimeoutError:
            raise RuntimeError("a collective failed, and what is wrong is not told") from None

    def _let_go(self, live: Live, work: Work | None, touched: object) -> None:
        """Free what an aborted collective uses, once it surely uses it no more; else never."""
        if live.group is None:
            return
        ended = live.aborted.wait(ABORT_S)
        if ended and work is not None:
            with self._changed:
                ended = self._changed.wait_for(work.is_completed, ENDED_S)
        if not ended:
            keep_for_ever(live.group, work, touched)
            log.warning("abandoned epoch=%s aborted=%s", live.epoch, live.aborted.is_set())

    def _beside(self) -> contextlib.AbstractContextManager[Any]:
        """What is waited for within is, on the card, by a stream of its own: if it never ends, the
        training's goes on."""
        on_card = self.device.type == "cuda"
        return queued_on(torch.cuda.Stream(self.device) if on_card else None)  # type: ignore[no-untyped-call]

    # --- its end --------------------------------------------------------------------------------

    def _retire(self, linger_s: float = 0.0) -> None:
        """Give up the present group, at most once; the lock is held. Unless its epoch breaks
        meanwhile, it may send what is to be sent for so long."""
        live, self._live = self._live, None
        if live is not None:
            live.hands.end()
            if live.group is not None:
                self._abort(live, linger_s)

    def _abort(self, live: Live, linger_s: float = 0.0) -> None:
        """On a thread of its own: it may take for ever, though the collectives have failed."""
        thread = threading.Thread(
            target=self._abort_now, args=(live, linger_s), name="drydock-abort", daemon=True
        )
        thread.start()
        self._watch(thread)

    def _watch(self, thread: threading.Thread) -> None:
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]

    def _abort_now(self, live: Live, linger_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.broken(live.epoch), linger_s)
            self._broken_epoch = max(self._broken_epoch, live.epoch)  # it is asked no more
            self._changed.notify_all()
        try:
            live.group.abort()
        except RuntimeError as error:
            keep_for_ever(live.group)
            log.warning("abort_failed epoch=%s error=%s", live.epoch, error)
            return
        live.aborted.set()


class Hands:
    """A thread that does what it is given, one after another; it may hang, and nobody minds."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="drydock-nccl", daemon=True)
        self.thread.start()

    def do(self, call: Callable[[], T]) -> Future[T]:
        """What it returns or raises will be in the future."""
        future: Future[T] = Future()

        def task() -> None:
            try:
                result = call()
            except BaseException as error:  # raised again where it is waited for
                log.debug("failed", exc_info=True)
                future.set_exception(error.with_traceback(None))  # frames hold what it touched
            else:
                future.set_result(result)

        self._tasks.put(task)
        return future

    def end(self) -> None:
        """After what it was given so far."""
        self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # and what it holds


def keep_for_ever(*things: object) -> None:
    """Never destroy these: NCCL still uses them, and a destructor would wait for that."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def make_group(store: Store, rank: int, members: int) -> Any:
    """Torch's own group. Its communicator comes to be with its first collective, and blocks nobody:
    one that blocks could not be aborted while it waits for a peer that died."""
    from torch.distributed import ProcessGroupNCCL  # builds for CPU have none

    options = ProcessGroupNCCL.Options()
    options.config.blocking = 0
    # Torch lends its streams in turn: a kernel that outlives its abort would block one of those on
    # which we copy. These are of another set.
    options.is_high_priority_stream = True
    options._timeout = datetime.timedelta(seconds=ABORT_S)
    with without_watchdog():
        return ProcessGroupNCCL(store, rank, members, options)


@contextlib.contextmanager
def without_watchdog() -> Iterator[None]:
    """Groups made meanwhile have none; those of the script keep theirs."""
    before = os.environ[NO_WATCHDOG]
    os.environ[NO_WATCHDOG] = "1"
    try:
        yield
    finally:
        os.environ[NO_WATCHDOG] = before
