"""What a replica holds ready for its peers: a copy of its state, and the last reduced gradients.

Every request carries the job's token; every chunk its xxh3 hash. Never touches the model: it serves
copies that the training thread staged at a step's edge.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from runtime.background import in_background
from runtime.framing import PeerFailed, send_chunk, send_json
from runtime.image import CHUNK_BYTES, Staged
from runtime.priority import lower_priority
from runtime.replica.pacing import Pace
from runtime.serving import RequestServer
from runtime.snapshot import Copying, slices_of

log = logging.getLogger("drydock.peers")

#: Of reduced gradients, while somebody follows. In the host's memory it may be as much as the copy
#: that was taken: whoever is given steps faster than they are made catches up before they are gone.
LOG_BYTES = 64 << 20
LOG_STEPS = 8  # so many are kept then, however large, unless a card lacks the memory
#: Once nobody follows, of those that are kept no longer: a step waits for large memory to be given
#: back, and the one in which a newcomer enters has most to wait for.
DROPPED_AT_ONCE = 2
KNOWN_STEPS = 64  # of which it is known in which epoch they were made
MAX_WAIT_S = 1.0  # how long a request may wait for a step to be made


@dataclass(frozen=True)
class Reduced:
    """One committed step's reduced buffer: what a peer needs to make the same step."""

    step: int
    epoch: int
    buffer: torch.Tensor


class ReducedLog:
    """The reduced buffers of the last steps, ready for peers to ask for.

    Two are kept, or while a newcomer follows as many as it may need.
    """

    def __init__(self) -> None:
        self.copied = 0  # bytes of the state that a newcomer takes before it follows; 0: none does
        self._kept: OrderedDict[int, Reduced] = OrderedDict()
        #: step -> epoch in which it was made; of more of them
        self._epochs: OrderedDict[int, int] = OrderedDict()
        self._changed = threading.Condition()

    def add(self, reduced: Reduced) -> None:
        """Keep a committed step's buffer, drop the oldest ones, and wake who waits.

        Two are kept while nobody follows. While a newcomer follows, LOG_STEPS are kept, or more if
        they fit into LOG_BYTES. On the host they may also fill the size of the copy that it takes.
        On a card fewer are kept where memory is scarce. At most DROPPED_AT_ONCE are dropped in one
        call, for each costs the step time.
        """
        with self._changed:
            self._kept[reduced.step] = reduced
            self._kept.move_to_end(reduced.step)
            size = reduced.buffer.numel() * reduced.buffer.element_size()
            # On a card the training needs the memory more.
            allowed = LOG_BYTES if reduced.buffer.is_cuda else max(LOG_BYTES, self.copied)
            limit = max(LOG_STEPS, allowed // size) if self.copied else 2
            if self.copied and reduced.buffer.is_cuda and limit * size > LOG_BYTES:
                # Two less than there is room for: a step takes one before it is added, and a donor
                # whose card is full dies.
                fits = len(self._kept) + room_on(reduced.buffer.device) // size
                limit = max(2, min(limit, fits - 2))
            for _ in range(min(DROPPED_AT_ONCE, len(self._kept) - limit)):
                self._kept.popitem(last=False)
            self._epochs[reduced.step] = reduced.epoch
            while len(self._epochs) > KNOWN_STEPS:
                self._epochs.popitem(last=False)
            self._changed.notify_all()

    def epoch_of(self, step: int) -> int | None:
        """In which epoch this step was made, as long as that is known: also if its buffer is not
        kept any more."""
        with self._changed:
            return self._epochs.get(step)

    def get(self, step: int, wait_s: float, *, settled: bool) -> Reduced | None:
        """This step's, if it is kept; waits for one that is still to come.

        `settled`: only once another step was made on it. What one member alone may have made is
        made anew, with other bits, if that member dies.
        """
        least = step + 1 if settled else step
        with self._changed:
            self._changed.wait_for(lambda: self._newest() >= least, wait_s)
            return self._kept.get(step) if self._newest() >= least else None

    def clear(self) -> None:
        """Another state has taken the place of the one that these steps led to."""
        with self._changed:
            self._kept.clear()
            self._epochs.clear()

    def newest(self) -> int:
        """The last step that is kept; -1 for none."""
        with self._changed:
            return self._newest()

    def _newest(self) -> int:
        return next(reversed(self._kept), -1)


def room_on(device: torch.device) -> int:
    """So many bytes of this card the training has never taken, since it began."""
    try:
        free, _total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        return free + reserved - torch.cuda.max_memory_allocated(device)
    except RuntimeError:  # an allocator that the script brought counts nothing
        return sys.maxsize


class Offer:
    """A copy that newcomers may take, and how many use its memory still."""

    def __init__(self, copying: Copying, gone: Callable[[], None]) -> None:
        """`gone` is called once nobody uses it any more, on the thread of whoever was the last."""
        self.step = copying.step
        self.staged: Staged | None = None  # once it is whole, and hashed
        self._copying: Copying | None = copying
        self._gone = gone
        self._users = 2  # whoever offers it, and whoever finishes it
        self._lock = threading.Lock()

    def finish(self, *, low_priority: bool) -> Staged:
        """Make it whole, and hash it; once. `low_priority`: see `Copying.finish`."""
        assert self._copying is not None  # noqa: S101 - its finisher has not dropped it
        staged = self._copying.finish(low_priority=low_priority)
        _ = staged.digest
        self.staged = staged
        return staged

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Its memory stays as it is meanwhile. Raises PeerFailed if it is another's by now."""
        with self._lock:
            if not self._users:
                raise PeerFailed("this copy is gone")
            self._users += 1
        try:
            yield
        finally:
            self.drop()

    def drop(self) -> None:
        """One user less."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            self.staged = self._copying = None
        self._gone()


class PeerServer:
    """Serves peers the copy and the reduced gradients, on background threads.

    `on_staged` is called on a thread of its own once a copy was hashed, with its step and digest;
    the digest is "" if there is no copy after all. `pace` holds up what is taken of copies, over
    all connections together. It never holds up the reduced gradients, for whoever waits for them
    falls behind.
    """

    def __init__(
        self,
        host: str,
        token: str,
        kept: ReducedLog,
        on_staged: Callable[[int, str], None],
        pace: Pace | None = None,
    ) -> None:
        self.kept = kept
        self._pace = pace
        self.on_staged = on_staged
        self._offer: Offer | None = None
        self._server = RequestServer(host, token, self._serve)
        self.address = self._server.address

    def offer(self, copying: Copying, gone: Callable[[], None] = lambda: None) -> None:
        """Hold this copy ready; finished and hashed in the background, for training must go on.
        `gone` is called, on any thread, once its memory is not used any more."""
        self.kept.copied = copying.table.bytes
        former, self._offer = self._offer, Offer(copying, gone)
        _end(former)
        in_background("drydock-hold", partial(self._hold, self._offer), awaited=True)

    def release(self, *, log: bool) -> None:
        former, self._offer = self._offer, None
        _end(former)
        if log:
            self.kept.copied = 0

    def close(self) -> None:
        if self._pace is not None:
            self._pace.close()
        self._server.close()

    def _hold(self, offer: Offer, low_priority: bool) -> None:
        try:
            try:
                digest = offer.finish(low_priority=low_priority).digest
            except Exception as error:  # newcomers wait for it: they have to hear
                log.error("not_staged step=%s error=%r", offer.step, error)
                digest = ""
            if self._offer is offer:  # no other was offered meanwhile, and this one is wanted
                self.on_staged(offer.step, digest)
        finally:
            offer.drop()

    def _serve(self, connection: socket.socket, request: dict[str, Any]) -> None:
        if request["op"] == "reduced":
            self._serve_reduced(connection, request)
            return
        step, offer = int(request["step"]), self._offer
        staged = None if offer is None else offer.staged
        if offer is None or staged is None or staged.step != step:
            send_json(connection, {"error": f"no copy of step {step} is held here"})
            return
        with offer.used():  # if it is gone the peer asks another
            if request["op"] == "manifest":
                send_json(connection, staged.describe())
            else:
                first, count = int(request["first"]), int(request["count"])
                self._serve_chunks(connection, staged, range(first, first + count))

    def _serve_chunks(self, connection: socket.socket, staged: Staged, numbers: range) -> None:
        lower_priority()  # steps are asked for on other connections
        view = memoryview(staged.buffer)
        for number in numbers:
            chunk = view[number * CHUNK_BYTES :][:CHUNK_BYTES]
            if self._pace is not None:
                self._pace.take(len(chunk))
            send_chunk(connection, chunk, staged.hashes[number])

    def _serve_reduced(self, connection: socket.socket, request: dict[str, Any]) -> None:
        step, settled = int(request["step"]), bool(request["settled"])
        wait_s = min(float(request["wait_s"]), MAX_WAIT_S)
        reduced = self.kept.get(step, wait_s, settled=settled)
        newest = self.kept.newest()
        yet = newest < step + settled
        epoch = self.kept.epoch_of(step)
        # Of one epoch a step is the same bits for all.
        if not yet and epoch is not None and request.get("have") == epoch:
            send_json(connection, {"step": step, "epoch": epoch, "same": True})
            return
        if reduced is None:
            send_json(connection, {"newest": newest, "yet": yet})
            return
        size = reduced.buffer.numel() * reduced.buffer.element_size()
        send_json(connection, {"step": step, "epoch": reduced.epoch, "bytes": size})
        for view in slices_of(reduced.buffer):  # never written again
            for start in range(0, len(view), CHUNK_BYTES):
                send_chunk(connection, view[start : start + CHUNK_BYTES])


def _end(offer: Offer | None) -> None:
    """To give hundreds of megabytes back takes the kernel as long as half a short step."""
    if offer is not None:
        in_background("drydock-free", lambda _low_priority: offer.drop(), awaited=True)
