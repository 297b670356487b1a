"""How a replica comes to hold its peers' state, and hands its own on: membership's hands.

Carries out on the training thread, with torch and sockets, what membership decides.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Collection
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from runtime.replica.fetching import Follower, fetch_reduced, fetch_state
from runtime.replica.framing import PeerFailed
from runtime.replica.membership import CannotFollow
from runtime.replica.peers import PeerServer, Reduced, ReducedLog
from runtime.snapshot import Copying, Damaged, touched

if TYPE_CHECKING:
    from runtime.replica.group import ReplicaGroup

log = logging.getLogger("drydock.replica")


class Takeover:
    """Implements `membership.Trainer` for a replica group."""

    def __init__(self, group: ReplicaGroup, host: str) -> None:
        self._group = group
        self._kept = ReducedLog()
        self._server = PeerServer(host, group.job.token, self._kept, self._say_staged)
        self._follower: Follower | None = None
        #: memory for the next copy, once its making was asked for
        self._copying: Copying | None = None  # until it surely is finished
        self._room: Future[memoryview | None] | None = None

    @property
    def address(self) -> str:
        """Where peers reach us."""
        return self._server.address

    @property
    def committed(self) -> int:
        return self._group.state.committed

    @property
    def held(self) -> Collection[int]:
        return self._group.engine.held

    def digest(self) -> str:
        return self._group.state.copy().digest

    def close(self) -> None:
        self.stop_following()
        self._server.close()

    # --- a newcomer -----------------------------------------------------------------------------

    def load(self) -> None:
        self.await_copy()
        state = self._group.state
        staged = self._group.saver.load()
        if staged is not None and staged.step > state.committed:
            state.load(staged)
            self._kept.clear()
        else:
            state.statistics.reload()

    def take(self, step: int, digest: str, donors: list[str]) -> None:
        group = self._group
        group.observer.at("sync", group.pending)
        self.await_copy()
        try:
            group.state.load(fetch_state(donors, group.job.token, step, digest))
        except (PeerFailed, Damaged) as error:
            raise CannotFollow(str(error)) from error
        self._kept.clear()
        group.link.step = group.state.committed

    def follow(self, donors: list[str]) -> None:
        self.stop_following()
        shuffled = list(donors)
        random.Random(os.getpid()).shuffle(shuffled)  # noqa: S311 - spreads the load
        group = self._group
        self._follower = Follower(shuffled, group.job.token, group.pending, group.link.inbox.put)

    def stop_following(self) -> None:
        if self._follower is not None:
            self._follower.stop()
            self._follower = None

    def make(self, reduced: Reduced) -> None:
        group = self._group
        if reduced.step == group.pending and self._follower is not None:
            group.commit(reduced, group.engine.gradients.read(reduced.buffer))
            self._follower.applied()

    def replay(self, step: int, donors: list[str]) -> None:
        group = self._group
        while group.state.committed < step:
            try:
                reduced = fetch_reduced(donors, group.job.token, group.pending)
            except PeerFailed as error:
                raise CannotFollow(str(error)) from error
            group.commit(reduced, group.engine.gradients.read(reduced.buffer))

    # --- a member -------------------------------------------------------------------------------

    def connect(self, grant: dict[str, Any]) -> None:
        group = self._group
        me = group.member.replica
        group.teller.granted(grant, group.state.committed, me)
        replicas = [int(m["replica"]) for m in grant["members"]]
        ports = [int(m["gloo_port"]) for m in grant["members"]]
        group.gloo.build(group.link, int(grant["epoch"]), ports, replicas.index(me))

    def enter(self, grant: dict[str, Any]) -> None:
        group = self._group
        replicas = [int(m["replica"]) for m in grant["members"]]
        group.engine.enter(int(grant["epoch"]), group.member.replica, replicas, grant)
        log.info("entered epoch=%s members=%s", grant["epoch"], replicas)
        group.observer.granted(grant)

    def made(self, reduced: Reduced) -> None:
        """A step was applied: peers may want it."""
        self._kept.add(reduced)

    def ready_to_stage(self) -> bool:
        """Whether there is memory for a copy; begins to make it, on a thread of its own."""
        if self._room is None:
            self._room = Future()
            threading.Thread(
                target=self._make_room,
                args=(self._room, self._group.state.size()),
                name="drydock-room",
                daemon=True,
            ).start()
        return self._room.done()

    def stage(self) -> None:
        room = self._room.result() if self._room is not None and self._room.done() else None
        self._room = None
        self._copying = self._group.state.begin_copy(room)
        self._server.offer(self._copying)

    def await_copy(self) -> None:
        """Before the state changes: wait until what is being copied of it is."""
        if self._copying is not None:
            self._copying.finished.wait()
            self._copying = None

    def release(self, *, log: bool) -> None:
        self._room = None
        self._server.release(log=log)

    def _make_room(self, room: Future[memoryview | None], size: int) -> None:
        try:
            room.set_result(touched(size))
        except MemoryError:
            self.trouble("no_room_for_newcomers", f"{size} bytes for a copy cannot be had")
            room.set_result(None)

    def forget(self) -> None:
        self._group.engine.forget()

    def heard_of_loss(self, message: dict[str, Any]) -> None:
        self._group.observer.lost(message)
        self._group.teller.lost(message, self._group.state.committed)

    def trouble(self, kind: str, text: str) -> None:
        self._group.job.trouble(kind, text)

    def _say_staged(self, step: int, digest: str) -> None:
        """On a thread of its own: the copy is hashed, peers may take it."""
        self._group.link.say("staged", step=step, digest=digest)
